"""docs/onboarding.md, followed command by command: each line's exit code, and the output that the page shows."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from mlx_audit.adapters.patching import codemods

DOCS = Path(__file__).parents[1] / "docs"
BLOCK = re.compile(r"```(bash|text|python)\n(.*?)```", re.DOTALL)
EXIT = re.compile(r"# exit (\d)$")


def run(arguments: list[str], folder: Path) -> tuple[int, str]:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        arguments,
        cwd=folder,
        env={**os.environ, "PATH": path, "MLX_AUDIT_RECORDS": ""},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=300,
    )
    return done.returncode, done.stdout


def flat(text: str) -> str:
    """Return a text with all white space as single spaces: a terminal's width is not the page's business."""
    return " ".join(text.split())


def test_every_codemod_is_in_the_table() -> None:
    page = (DOCS / "onboarding.md").read_text(encoding="utf-8")
    named = re.findall(r"^\| `(\w+)` \|.+\|.+\|$", page, re.MULTILINE)
    assert sorted(named) == [mod.name for mod in codemods()]


@pytest.mark.xdist_group("onboarding")
def test_each_step_does_what_the_page_says(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(DOCS / "onboarding", tmp_path / "onboarding"))
    printed, shown, programs = "", 0, 0
    for kind, code in BLOCK.findall((DOCS / "onboarding.md").read_text(encoding="utf-8")):
        if kind == "text":
            for line in code.splitlines():
                assert flat(line) in flat(printed), f"the page shows {line!r}; printed was:\n{printed}"
                shown += 1
        elif kind == "python":
            status, printed = run([sys.executable, "-c", code], folder)
            assert (status, printed.split()) == (0, ["6", "1"]), printed
            programs += 1
        else:
            printed = ""
            for line in code.splitlines():
                wanted = EXIT.search(line)
                status, output = run(["bash", "-c", line], folder)
                assert status == (int(wanted[1]) if wanted else 0), f"{line}\n{output}"
                printed += output
    assert shown > 10
    assert programs == 1
    assert (folder / "records" / "marten").is_dir()
    assert (folder / "configurations" / "marten.json").read_bytes() == (folder / "config.json").read_bytes()
