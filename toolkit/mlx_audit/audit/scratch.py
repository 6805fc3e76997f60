"""Where a child keeps its temporary files: one folder of its own, that goes with it however it ends.

The child holds a lock on the folder as long as it lives. It takes the folder away when it ends, also when its parent is
gone; its parent does where it killed the child; and where both were killed, the next child does, which finds the folder
unlocked. Only Python's own temporary files go there: MLX keeps its compiled kernels for all in the system's folder.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

PREFIX = "mlx-audit-child-"

_held: list[tuple[int, Path]] = []
"""The descriptor of the lock, and the folder, of this process."""


def enter_scratch() -> Path:
    """Make the folder of this process, which Python's temporary files then go to, and clear what dead ones left."""
    clear_scratch()
    while True:
        folder = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-"))
        descriptor = _lock(folder)
        if descriptor is not None and folder.is_dir():
            break
        # Another process has taken it for a leftover before it was locked.
    _held.append((descriptor, folder))
    tempfile.tempdir = str(folder)
    return folder


def leave_scratch() -> None:
    """Take the folder of this process away; harmless where there is none."""
    while _held:
        descriptor, folder = _held.pop()
        shutil.rmtree(folder, ignore_errors=True)
        os.close(descriptor)


def clear_scratch(process: int | None = None) -> None:
    """Take away the folders whose processes are gone.

    Args:
        process: Only that of this process, which has ended.
    """
    name = f"{PREFIX}*" if process is None else f"{PREFIX}{process}-*"
    for folder in _folders(name):
        if (descriptor := _lock(folder)) is not None:
            shutil.rmtree(folder, ignore_errors=True)
            os.close(descriptor)


def _folders(name: str) -> Iterator[Path]:
    """Yield our own folders of this name; nobody else's, and no links."""
    with contextlib.suppress(OSError):
        for path in Path(tempfile.gettempdir()).glob(name):
            with contextlib.suppress(OSError):
                found = path.lstat()
                if stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid():
                    yield path


def _lock(folder: Path) -> int | None:
    """Return the descriptor that holds a folder's lock; None where another process holds it, or it is gone."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor
