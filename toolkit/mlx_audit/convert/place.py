"""Where DST is made: in a temporary folder beside it, which takes its name when all is done."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from mlx_audit.convert.source import Source
from mlx_audit.errors import MlxAuditError
from mlx_audit.evidence.atomic import hold, locked
from mlx_audit.evidence.stamps import FILE

_MARK = ".mlx-audit-"
_LOCK = "lock"
_SPARE = 8 << 20
"""Bytes for tokenizer, configuration and stamp."""
_LONGEST = 200
"""Bytes of DST's name in the temporary folder's; a file system takes 255."""


class PlaceError(MlxAuditError):
    """DST cannot be made there."""


@dataclass(frozen=True)
class Place:
    """A DST that was looked at, and can be made.

    Attributes:
        path: DST, with links resolved.
        in_place: DST is SRC, which is stamped as it is.
    """

    path: Path
    in_place: bool


def require_place(source: Source, text: str) -> Place:
    """Return where DST goes.

    Raises:
        PlaceError: it is there and not empty, cannot be written, or lies within SRC or SRC within it.
    """
    if not text.strip():
        raise PlaceError("no folder is named", where="DST", found=repr(text))
    try:
        path = Path(text).resolve()
        if path == source.path and source.kind != "gguf":
            return _in_place(path, text)
        _require_free(path, text)
    except (OSError, RuntimeError, ValueError) as error:
        raise PlaceError("it cannot be written", where=f"DST {text}", found=error) from error
    if path.is_relative_to(source.path) or source.path.is_relative_to(path):
        raise PlaceError("one of SRC and DST lies within the other", where=f"DST {text}", found=source.path)
    return Place(path, in_place=False)


def _require_free(path: Path, text: str) -> None:
    if path.exists() and not path.is_dir():
        raise PlaceError("there is a file of that name", where=f"DST {text}", allowed="a new folder")
    if path.is_dir() and any(path.iterdir()):
        raise PlaceError(
            "the folder is there and not empty",
            where=f"DST {text}",
            allowed="a new folder, an empty one, or SRC itself, to be stamped",
            fix="name another folder, or remove this one",
        )
    if not path.parent.is_dir():
        raise PlaceError(
            "no such folder", where=f"DST {text}", found=path.parent, fix=f"mkdir -p {path.parent}"
        )
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise PlaceError("it cannot be written", where=f"DST {text}", found=f"{path.parent}: no permission")


def _in_place(path: Path, text: str) -> Place:
    """Only the stamp and the model card are written, and no link is followed for that."""
    for name in (FILE, "README.md"):
        file = path / name
        if file.is_symlink() or (file.exists() and not file.is_file()):
            raise PlaceError(
                "only a file of the folder's own can be written",
                where=str(file),
                found="a link" if file.is_symlink() else "no file",
                fix=f"convert to another folder: mlx-audit convert {text} DST",
            )
    if not os.access(path, os.W_OK | os.X_OK):
        raise PlaceError("the stamp cannot be written", where=f"DST {text}", found="no permission")
    return Place(path, in_place=True)


def require_room(place: Place, needed: int) -> None:
    """Refuse, before any work, a disk that lacks room for the weights.

    Raises:
        PlaceError: says how much is free.
    """
    free = shutil.disk_usage(place.path.parent).free
    if free < needed + _SPARE:
        raise PlaceError(
            "there is no room for the weights",
            where=f"DST {place.path}",
            found=f"{free:,} bytes free",
            allowed=f"{needed + _SPARE:,} bytes",
        )


@contextlib.contextmanager
def stage(path: Path) -> Iterator[Path]:
    """Yield a new folder beside `path` that is gone in the end; what killed runs left beside it goes first.

    It is locked while it is in use. The system frees the lock of a process that dies, however it dies.
    """
    begin = f".{os.fsdecode(os.fsencode(path.name)[:_LONGEST])}{_MARK}"
    _clear(path.parent, begin)
    folder = path.parent / f"{begin}{os.getpid()}"
    another = PlaceError("another run is making this folder", where=f"DST {path}", fix="try again")
    try:
        folder.mkdir()
    except FileExistsError:  # containers that share a disk may give the same number to two processes
        raise another from None
    lock = -1
    try:
        try:
            lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        except FileNotFoundError:  # taken for a leftover before there was a lock
            raise another from None
        if not hold(lock, folder / _LOCK):
            raise another
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        if lock >= 0:
            os.close(lock)


def publish(made: Path, place: Place) -> None:
    """Give a finished folder its name; another run that was faster keeps its own.

    Raises:
        PlaceError: DST is there by now, or cannot be written.
    """
    try:
        made.rename(place.path)
    except OSError as error:
        there = error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR)
        raise PlaceError(
            "the folder is there by now" if there else "it cannot be written",
            where=f"DST {place.path}",
            found=error.strerror,
        ) from error


def _clear(parent: Path, begin: str) -> None:
    """Remove the folders of runs that were killed; those that somebody still fills are locked, and stay."""
    for left in sorted(parent.iterdir()):
        if left.name.startswith(begin) and left.name.removeprefix(begin).isdigit() and not left.is_symlink():
            with contextlib.suppress(OSError):
                left.rmdir()  # killed before there was a lock
            with contextlib.suppress(OSError), locked(left / _LOCK):
                shutil.rmtree(left, ignore_errors=True)
