"""Atomic writes: a reader finds the old file or the new one, and what killed writers leave is taken away."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mlx_audit.evidence import atomic
from mlx_audit.evidence.atomic import PREFIX, clear_leftovers, write_atomically

WRITER = """
import sys
from pathlib import Path
from mlx_audit.evidence.atomic import write_atomically
path, text = Path(sys.argv[1]), sys.argv[2] * 400_000
print("ready", flush=True)
while True:
    write_atomically(path, text)
"""
"""Writes as `run --record` does, without end."""

KILLER = """
import json, os, random, sys, time
from pathlib import Path
from mlx_audit.evidence.atomic import PREFIX, write_atomically
path, chance = Path(sys.argv[1]), random.Random(7)
torn = midway = 0
for kill in range(50):
    letter = "abcdefgh"[kill % 8]
    process = os.fork()
    if process == 0:
        while True:
            WRITE(path, letter * 400_000)
    time.sleep(chance.uniform(0, 0.02))
    os.kill(process, 9)
    os.waitpid(process, 0)
    text = path.read_text()
    torn += len(text) != 400_000 or len(set(text)) != 1
    midway += bool(list(path.parent.glob(PREFIX + "*")))
print(json.dumps([torn, midway]))
"""
"""Kills 50 writers at any moment; forks, since a start takes longer than many writes."""


def writer(path: Path, letter: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", WRITER, str(path), letter], stdout=subprocess.PIPE)


def started(path: Path, letter: str) -> subprocess.Popen[bytes]:
    process = writer(path, letter)
    assert process.stdout is not None
    process.stdout.readline()
    return process


def killed(path: Path, write: str) -> tuple[int, int]:
    """Return how often of 50 kills the file was torn, and how often a temporary file was left."""
    script = KILLER.replace("WRITE", write)
    done = subprocess.run(
        [sys.executable, "-c", script, str(path)], capture_output=True, text=True, check=True
    )
    torn, midway = json.loads(done.stdout)
    return torn, midway


def test_fifty_kills_leave_the_old_file_or_a_new_one(tmp_path: Path) -> None:
    """Each writer writes a letter of its own; the next write leaves nothing of the killed ones."""
    path = tmp_path / "record.json"
    path.write_text("a" * 400_000)
    torn, midway = killed(path, "write_atomically")
    assert torn == 0
    assert midway > 0, "some were killed midway"
    write_atomically(path, "end")
    assert [*tmp_path.iterdir()] == [path]
    assert path.read_text() == "end"


def test_the_kills_would_tear_a_file_that_is_written_in_place(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    path.write_text("a" * 400_000)
    torn, _ = killed(path, "Path.write_text")
    assert torn > 0


def test_a_killed_writer_is_seen_by_its_lock(tmp_path: Path) -> None:
    """What somebody still writes stays; what nobody holds goes, whoever made it."""
    dead, held = tmp_path / f"{PREFIX}dead", tmp_path / f"{PREFIX}held"
    dead.write_text("x")
    held.write_text("x")
    (tmp_path / f"{PREFIX}folder").mkdir()
    (tmp_path / f"{PREFIX}link").symlink_to(tmp_path / "other")
    (tmp_path / "other").write_text("x")
    os.mkfifo(tmp_path / f"{PREFIX}pipe")
    with atomic.locked(held):
        clear_leftovers(tmp_path)
        assert held.exists()
        assert not dead.exists()
    clear_leftovers(tmp_path)
    left = {path.name.removeprefix(PREFIX) for path in tmp_path.iterdir()}
    assert left == {"folder", "link", "pipe", "other"}


def test_two_writers_at_once_write_whole_files(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    processes = [started(path, letter) for letter in "ab"]
    try:
        seen = set()
        until = time.monotonic() + 20
        while len(seen) < 2 and time.monotonic() < until:
            text = path.read_text() if path.exists() else ""
            if text:
                assert text in ("a" * 400_000, "b" * 400_000)
                seen.add(text[0])
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    assert seen == {"a", "b"}


def test_a_full_disk_leaves_the_old_file(tmp_path: Path) -> None:
    """A limit on the size of files stands for a full disk: the write fails midway."""
    path = tmp_path / "record.json"
    write_atomically(path, "old")
    script = f"""
import resource, signal
from pathlib import Path
from mlx_audit.evidence.atomic import write_atomically
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
try:
    write_atomically(Path({str(path)!r}), "n" * 100_000)
except OSError as error:
    print(error.strerror)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.stdout == "File too large\n", done.stderr
    assert path.read_text() == "old"
    assert [*tmp_path.iterdir()] == [path]
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] != 1000


def test_an_interrupted_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "record.json"
    write_atomically(path, "old")

    def interrupted(_: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_atomically(path, "new")
    assert path.read_text() == "old"
    assert [*tmp_path.iterdir()] == [path]


def test_a_file_taken_for_a_leftover_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between making and locking it, another process may have taken it away."""
    flock, taken = atomic.fcntl.flock, []

    def late(descriptor: int, how: int) -> None:
        if not taken:
            taken.extend(tmp_path.glob(f"{PREFIX}*"))
            taken[0].unlink()
        flock(descriptor, how)

    monkeypatch.setattr(atomic.fcntl, "flock", late)
    write_atomically(tmp_path / "record.json", "text")
    assert taken
    assert (tmp_path / "record.json").read_text() == "text"
