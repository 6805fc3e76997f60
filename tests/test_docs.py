"""Every command and every Python example of the documents is run, unless a comment before it says why not, or when."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from mlx_audit.audit.bench_chart import Chart, milliseconds, ratios

ROOT = Path(__file__).parents[1]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
FOLLOWED = ROOT / "docs" / "onboarding.md"
"""Its commands build on each other: tests/test_onboarding.py follows them."""
BLOCK = re.compile(
    r"(?P<mark><!-- (?P<kind>skip|nightly): .+? -->\n)?```(?P<language>bash|python)\n(?P<code>.*?)```",
    re.DOTALL,
)
LINK = re.compile(r"\]\((?!https?:)([^)#]+)")


def blocks(language: str, *, skipped: bool = False) -> list[object]:
    found = []
    for document in (document for document in DOCUMENTS if document != FOLLOWED):
        for match in BLOCK.finditer(document.read_text(encoding="utf-8")):
            if match["language"] == language and (match["kind"] == "skip") == skipped:
                line = document.read_text(encoding="utf-8")[: match.start()].count("\n") + 1
                marks = [pytest.mark.nightly] if match["kind"] == "nightly" else []
                found.append(pytest.param(match["code"], id=f"{document.name}:{line}", marks=marks))
    return found


def run(arguments: list[str]) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    return subprocess.run(
        arguments, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=300
    )


@pytest.mark.parametrize("code", blocks("bash"))
def test_command_runs(code: str) -> None:
    for line in code.splitlines():
        words = shlex.split(line, comments=True)
        if words:
            done = run(words)
            assert done.returncode == 0, f"{line}\n{done.stdout}\n{done.stderr}"


@pytest.mark.parametrize("code", [block for block in blocks("python") if "class " not in block.values[0]])  # type: ignore[attr-defined]
def test_python_example_runs(code: str) -> None:
    done = run([sys.executable, "-c", code])
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(document: Path) -> None:
    for target in LINK.findall(document.read_text(encoding="utf-8")):
        assert (document.parent / target).exists(), f"{document.name} links to {target}"


@pytest.mark.parametrize(("results", "chart"), [("cpu", ratios), ("gpu", milliseconds)])
def test_charts_are_what_the_tool_draws(results: str, chart: Callable[[list[object]], Chart]) -> None:
    found = json.loads((ROOT / f"docs/measured/{results}.json").read_text(encoding="utf-8"))
    drawn = (ROOT / f"docs/bench-{results}.svg").read_text(encoding="utf-8")
    assert drawn == chart(found).svg()
    assert len(drawn) < 20_000


def test_documents_were_found() -> None:
    assert ROOT / "README.md" in DOCUMENTS
    assert blocks("bash"), "README has commands"


def test_every_verb_is_in_the_readme() -> None:
    verbs = {
        path.stem for path in (ROOT / "toolkit/mlx_audit/cli").glob("*.py") if not path.stem.startswith("_")
    }
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert verbs, "verbs are found"
    for verb in verbs:
        assert f"`{verb}" in text, f"README does not name `{verb}`"
