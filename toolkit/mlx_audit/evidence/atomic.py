"""Files written so that a reader, or whoever was killed while writing, finds the old one or the new one.

The new text goes into a temporary file beside the old one, which then takes its name. While it is written its writer
holds a lock on it: the system frees the lock of a process that dies, however it dies, and whoever writes into the
folder next takes what nobody holds away.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path

PREFIX = ".mlx-audit-"
"""How the names of our temporary files begin."""


def write_atomically(path: Path, text: str) -> None:
    """Write a text file so that a reader, or a killed run, sees the old file or the new one.

    A link stays a link. What is no file, such as a pipe or a device, is written to, never replaced. What killed runs
    left in the folder is taken away.

    Raises:
        OSError: it cannot be written, as on a full disk; what was there is as it was.
    """
    mode = _mode(path)
    if mode is not None and not stat.S_ISREG(mode):
        with path.open("w", encoding="utf-8") as file:
            file.write(text)
        return
    path = path.resolve()
    clear_leftovers(path.parent)
    descriptor, temporary = _create(path.parent)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        try:
            file.write(text)
            file.flush()
            os.fsync(descriptor)
            temporary.chmod(0o644)
            temporary.replace(path)  # still locked: once it is free, it has its name
        except BaseException:
            temporary.unlink(missing_ok=True)
            with contextlib.suppress(OSError):
                file.close()  # what is in its buffer does not fit either
            raise


def clear_leftovers(folder: Path, prefix: str = PREFIX) -> None:
    """Take away the temporary files in a folder whose writers are gone; those that somebody still writes stay."""
    with contextlib.suppress(OSError):
        for path in sorted(folder.glob(f"{prefix}*")):
            with contextlib.suppress(OSError), locked(path):
                path.unlink()


@contextlib.contextmanager
def locked(path: Path) -> Iterator[int]:
    """Hold the lock of a file, and yield its descriptor.

    Raises:
        OSError: it is no plain file, another process holds it, or the file system knows no locks.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(f"{path} is no plain file")
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield descriptor
    finally:
        os.close(descriptor)


def _create(folder: Path) -> tuple[int, Path]:
    """Return the descriptor of a new temporary file, which we hold, and its path."""
    while True:
        path = folder / f"{PREFIX}{secrets.token_hex(8)}"
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        if hold(descriptor, path):
            return descriptor, path
        os.close(descriptor)


def hold(descriptor: int, path: Path) -> bool:
    """Lock a new file of ours until it is closed; False when it was taken for a leftover before we could."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True  # no locks here: then nobody can take it for a leftover either
    try:
        return path.stat().st_ino == os.fstat(descriptor).st_ino
    except FileNotFoundError:
        return False


def _mode(path: Path) -> int | None:
    """What kind of thing a path leads to; None when there is nothing."""
    try:
        return path.stat().st_mode
    except FileNotFoundError:
        return None
