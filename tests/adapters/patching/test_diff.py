"""Diffs that `git apply` and `patch` take."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from mlx_audit.adapters.patching import PatchedSource, unified_diff

LINES = [f"line {number}" for number in range(20)]
BEFORE = "\n".join(LINES) + "\n"
AFTER = BEFORE.replace("line 3\n", "line 3\nnew\n").replace("line 17\n", "")
APPLY = {"git": ["git", "apply", "the.patch"], "patch": ["patch", "--binary", "-p1", "-s", "-i", "the.patch"]}


def source(before: str, after: str, name: str = "afm7.py", module: str = "afm7") -> PatchedSource:
    return PatchedSource(module, Path("/elsewhere") / name, before, after, ())


@pytest.mark.parametrize("tool", APPLY)
@pytest.mark.parametrize(
    ("before", "after"),
    [
        (BEFORE, AFTER),
        (BEFORE.rstrip("\n"), AFTER.rstrip("\n")),
        (BEFORE.rstrip("\n"), AFTER + "end\n"),
        (BEFORE, AFTER.rstrip("\n") + "\nend"),
        (BEFORE.replace("\n", "\r\n"), AFTER.replace("\n", "\r\n")),
        (BEFORE.replace("line 5", "a\x0cb\u2028c"), AFTER.replace("line 5", "a\x0cb\u2028c")),
    ],
    ids=["plain", "no newline", "newline gained", "newline lost", "crlf", "other breaks"],
)
def test_a_patch_applies(tmp_path: Path, tool: str, before: str, after: str) -> None:
    assert applied(tmp_path, tool, source(before, after), "afm7.py") == after


@pytest.mark.parametrize("name", ["my model.py", "modèle.py", "-x.py"])
def test_names_of_users_files_are_kept(tmp_path: Path, name: str) -> None:
    assert applied(tmp_path, "git", source(BEFORE, AFTER, name), name) == AFTER


@pytest.mark.parametrize("name", ['a"b.py', "a\tb.py", "a\\b.py"])
def test_names_with_quotes_and_controls_are_quoted(tmp_path: Path, name: str) -> None:
    assert applied(tmp_path, "git", source(BEFORE, AFTER, name), name) == AFTER


def test_mlx_lms_own_files_are_named_from_the_folder_of_the_package(tmp_path: Path) -> None:
    own = source(BEFORE, AFTER, module="mlx_lm.models.afm7")
    assert unified_diff(own).startswith("--- a/mlx_lm/models/afm7.py\n+++ b/mlx_lm/models/afm7.py\n@@")
    assert applied(tmp_path, "patch", own, "mlx_lm/models/afm7.py") == AFTER


def test_several_files_are_one_diff_and_unchanged_ones_none(tmp_path: Path) -> None:
    other = source(BEFORE, AFTER + "more\n", "other.py")
    (tmp_path / "afm7.py").write_text(BEFORE)
    assert applied(tmp_path, "git", source(BEFORE, AFTER), "afm7.py", other) == AFTER
    assert (tmp_path / "other.py").read_text() == AFTER + "more\n"
    assert unified_diff(source(BEFORE, BEFORE)) == ""


def applied(folder: Path, tool: str, patched: PatchedSource, name: str, *others: PatchedSource) -> str:
    """Return what a file holds after a tool has applied the patch to its unpatched text."""
    file = folder / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(patched.before.encode())
    for other in others:
        (folder / other.path.name).write_bytes(other.before.encode())
    (folder / "the.patch").write_bytes(unified_diff(patched, *others).encode())
    subprocess.run(APPLY[tool], cwd=folder, check=True, timeout=60)
    return file.read_bytes().decode()
