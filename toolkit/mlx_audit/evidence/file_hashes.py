"""Sizes and SHA-256 of a checkpoint's files: all bytes, in chunks, several files at a time."""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Lock
from typing import NamedTuple

_CHUNK = 4 << 20

Listener = Callable[[int], None]
"""Told how many more bytes have been read."""


class Hashed(NamedTuple):
    """What a file holds."""

    bytes: int
    sha256: str


_known: dict[tuple[int, ...], Hashed] = {}
"""By what changes with the contents. The time of the last change of an inode cannot be set back, as that of its
contents can; so a file is read once a process, and again when it may have changed."""


def hash_files(folder: Path, names: Iterable[str], listener: Listener | None = None) -> dict[str, Hashed]:
    """Return size and digest of files.

    Args:
        folder: Where they lie.
        names: Names of regular files in it, or of links to such.
        listener: Told of progress, from several threads, but one at a time.

    Raises:
        OSError: a file cannot be read, or is no regular file.
    """
    lock = Lock()

    def told(count: int) -> None:
        if listener is not None:
            with lock:
                listener(count)

    wanted = list(names)
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        found = pool.map(lambda name: _hash(folder / name, told), wanted)
        return dict(zip(wanted, found, strict=True))


def state_of(path: Path) -> tuple[int, ...]:
    """Return numbers that change whenever a file's contents do.

    Raises:
        OSError: there is nothing, or it is no regular file.
    """
    return _numbers(path.stat(), path)


def _numbers(found: os.stat_result, path: Path) -> tuple[int, ...]:
    if not stat.S_ISREG(found.st_mode):
        raise OSError(0, "this is no regular file", str(path))
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def _hash(path: Path, told: Listener) -> Hashed:
    state_of(path)  # before it is opened: a pipe would wait for a writer
    with path.open("rb", buffering=0) as file:
        state = _numbers(os.fstat(file.fileno()), path)
        if state in _known:
            told(state[2])
            return _known[state]
        digest, size, room = hashlib.sha256(), 0, memoryview(bytearray(_CHUNK))
        while count := file.readinto(room):
            digest.update(room[:count])
            size += count
            told(count)
        hashed = Hashed(size, digest.hexdigest())
        if _numbers(os.fstat(file.fileno()), path) == state:
            _known[state] = hashed
    return hashed
