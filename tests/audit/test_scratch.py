"""The temporary folder of a child goes with it, however it ends."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from mlx_audit.audit import scratch

CHILD = """
import sys, tempfile
from mlx_audit.audit.scratch import enter_scratch, leave_scratch
enter_scratch()
folder = tempfile.mkdtemp()
print(folder, flush=True)
sys.stdin.read()
leave_scratch()
"""


@pytest.fixture(autouse=True)
def own_tmp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)


def child() -> tuple[subprocess.Popen[str], Path]:
    process = subprocess.Popen(
        [sys.executable, "-c", CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


def test_a_child_takes_its_folder_away(tmp_path: Path) -> None:
    process, folder = child()
    assert folder.parent.parent == tmp_path
    assert folder.is_dir()
    process.communicate("")
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_child_leaves_is_cleared_and_nothing_else(tmp_path: Path) -> None:
    """A living child's folder stays, and so do links and folders that are not ours by name."""
    living, kept = child()
    dead, left = child()
    (tmp_path / "mlx-audit-other").mkdir()
    (tmp_path / f"{scratch.PREFIX}link").symlink_to(kept)
    dead.kill()
    dead.communicate()
    assert left.is_dir()
    scratch.clear_scratch(living.pid)
    assert kept.is_dir()
    assert left.is_dir(), "another process was meant"
    scratch.clear_scratch(dead.pid)
    assert not left.parent.exists()
    scratch.clear_scratch()
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {kept.parent.name, "mlx-audit-other", f"{scratch.PREFIX}link"}
    living.kill()
    living.communicate()
    scratch.clear_scratch()
    assert not kept.parent.exists()
    assert (tmp_path / f"{scratch.PREFIX}link").is_symlink()
