"""`run --record`, killed at any moment: the record is the old or the new one, and the next run cleans up."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import tempfile
import time
from pathlib import Path

import pytest

from command import COMMAND, environment, mlx_audit
from gated import HOST_READ, own_family
from mlx_audit.evidence.environment import backend
from mlx_audit.evidence.records import load_record, record_path


def folders(tmp_path: Path) -> tuple[Path, dict[str, str | None]]:
    """Return a temporary folder and the environment that names it; compiled kernels stay where they are."""
    place = tmp_path / "tmp"
    place.mkdir()
    kernels = Path(tempfile.gettempdir()) / "mlx"
    kernels.mkdir(exist_ok=True)
    (place / "mlx").symlink_to(kernels)
    return place, {"TMPDIR": str(place)}


def kill_at(seconds: float, manifest: Path, env: dict[str, str | None]) -> bool:
    """Start the command, kill it after some time, and wait for its child to end; return whether it was running."""
    process = subprocess.Popen(
        [*COMMAND, "run", str(manifest), "--record"],
        env=environment(env),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    time.sleep(seconds)
    running = process.poll() is None
    children = _children(process.pid)
    process.send_signal(signal.SIGKILL)
    process.wait()
    until = time.monotonic() + 30
    while any(map(_lives, children)) and time.monotonic() < until:
        time.sleep(0.01)
    assert not any(map(_lives, children)), "a child outlives its parent"
    return running


def _children(process: int) -> list[int]:
    done = subprocess.run(
        ["ps", "-o", "pid=", "--ppid", str(process)], capture_output=True, text=True, check=False
    )
    return [int(pid) for pid in done.stdout.split()]


def _lives(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    done = subprocess.run(
        ["ps", "-o", "stat=", "-p", str(process)], capture_output=True, text=True, check=False
    )
    return done.stdout.strip()[:1] not in ("", "Z")


def refuted(tmp_path: Path) -> Path:
    """Return the manifest of a family that is claimed not to be capable, whose audit is short, and its first record."""
    return own_family(tmp_path, HOST_READ, claim="not-capable")


def kills(tmp_path: Path, count: int, seed: int) -> None:
    place, env = folders(tmp_path)
    manifest = refuted(tmp_path)
    path = record_path(tmp_path / "records", "mine", backend())
    old = path.read_bytes()
    started = time.monotonic()
    assert mlx_audit("run", manifest, "--record", env=env).returncode == 0
    seconds = time.monotonic() - started
    new = path.read_bytes()
    assert new != old
    path.write_bytes(old)
    chance, running = random.Random(seed), 0
    for _ in range(count):
        # Most of a run passes before it writes; half of the kills come in its last fifth.
        early = chance.uniform(0, seconds)
        running += kill_at(chance.choice((early, seconds * chance.uniform(0.8, 1.02))), manifest, env)
        assert path.read_bytes() in (old, new)
        load_record(path)
    assert running > 0
    assert mlx_audit("run", manifest, "--record", env=env).returncode == 0
    assert path.read_bytes() == new, "the same evidence is the same bytes"
    assert list(path.parent.iterdir()) == [path]
    assert [found.name for found in place.iterdir()] == ["mlx"], "nothing is left of killed runs"


def test_three_kills_of_the_real_command(tmp_path: Path) -> None:
    kills(tmp_path, 3, seed=1)


@pytest.mark.nightly
def test_five_hundred_kills_of_the_real_command(tmp_path: Path) -> None:
    kills(tmp_path, 500, seed=2)


FULL = """
import resource, signal, sys
from mlx_audit.cli import main
from mlx_audit.evidence import atomic
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
create = atomic._create
def full(folder):
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))
    return create(folder)
atomic._create = full
sys.argv[0] = "mlx-audit"
main()
"""
"""The command line on a disk that is full once the record is written: no file may grow beyond 2,000 bytes."""


def test_a_full_disk_is_told_and_leaves_the_old_record(tmp_path: Path) -> None:
    manifest = refuted(tmp_path)
    path = record_path(tmp_path / "records", "mine", backend())
    old = path.read_bytes()
    done = subprocess.run(
        [*COMMAND[:2], "-c", FULL, "run", str(manifest), "--record"],
        env=environment(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2, done.stderr
    assert f"error: {path}: the record cannot be written; found: File too large" in done.stderr
    assert "Traceback" not in done.stderr
    assert path.read_bytes() == old
    assert list(path.parent.iterdir()) == [path]
