"""Files of a store: written so that a killed process leaves the old store, read without trust."""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from mlx_audit.prefix.reasons import PrefixRefused, Reason

MANIFEST = "manifest.json"
_LOCK = ".lock"
_TEMPORARY = ".new-"
_BLOCK = 1 << 20
BODY = re.compile(r"[0-9a-f]{64}\.safetensors")
"""Name of a body: the digest of its bytes, so that no body is ever replaced by another one."""


@contextmanager
def locked(folder: Path, seconds: float) -> Iterator[None]:
    """Hold the store for one writer; the system lets go of it when the process ends, however it ends.

    Raises:
        PrefixRefused: busy: another one still held it after `seconds`.
    """
    descriptor = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
    try:
        until = time.monotonic() + seconds
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= until:
                    raise PrefixRefused(Reason.BUSY, where=str(folder), allowed=f"{seconds:g} s") from None
                time.sleep(0.02)
        yield
    finally:
        os.close(descriptor)


def temporary(folder: Path, name: str) -> Path:
    """Return a free place for a file that is not yet part of the store; what lies there is from a dead process."""
    place = folder / f"{_TEMPORARY}{name}"
    place.unlink(missing_ok=True)
    return place


def publish(written: Path, place: Path) -> None:
    """Move a written file to its place, its bytes on the disk before its name."""
    with written.open("rb") as file:
        os.fsync(file.fileno())
    written.replace(place)


def flush(folder: Path) -> None:
    """Put the names in a folder on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sweep(folder: Path, used: set[str]) -> None:
    """Remove bodies that the manifest does not name, and what dead processes left; the caller holds the lock."""
    for path in folder.iterdir():
        unused = BODY.fullmatch(path.name) is not None and path.name not in used
        if unused or path.name.startswith(_TEMPORARY):
            path.unlink(missing_ok=True)


@contextmanager
def opened(path: Path) -> Iterator[BinaryIO]:
    """Open a regular file of a store; a link, a pipe or a device is refused, and none is waited for.

    Raises:
        PrefixRefused: damaged.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise PrefixRefused(
            Reason.DAMAGED, "a file of the store is missing or cannot be read", where=str(path), found=error
        ) from error
    with os.fdopen(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise PrefixRefused(Reason.DAMAGED, "not a regular file", where=str(path))
        yield file


def size_of(file: BinaryIO) -> int:
    """Return the bytes of an open file."""
    return os.fstat(file.fileno()).st_size


def digest_of(file: BinaryIO) -> str:
    """Return the SHA-256 of an open file, and go back to its start."""
    file.seek(0)
    total = hashlib.sha256()
    while block := file.read(_BLOCK):
        total.update(block)
    file.seek(0)
    return total.hexdigest()
