"""Files that a verb writes over: refused, before any work, where something would be lost."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from mlx_audit.cli import _choices
from mlx_audit.errors import MlxAuditError

if TYPE_CHECKING:
    from mlx_audit.models.target import Target

MOST_COMPARED = 16 << 20
"""Bytes of what `--check` reads."""

_PATCH = b"--- a/"
_QUOTED_PATCH = b'--- "a/'
"""How a patch begins that names a file with a quote or a control in its name."""


def inputs(target: Target, config: Path | None = None) -> list[Path]:
    """Return the files that a target is made of: what an audit reads, it never writes."""
    found = [] if config is None else [config]
    if target.file is not None:
        found.append(target.file)
    if target.folder is not None:
        found += target.folder.iterdir() if target.folder.is_dir() else [target.folder]
    if (manifest := target.manifest) is not None:
        found += [manifest.path, *map(manifest.configuration_path, manifest.configurations)]
    return found


def require_no_input(option: str, place: Path, read: Iterable[Path], how: str = "audited") -> None:
    """Refuse to write over what is read."""
    for file in read if place.exists() else ():
        if file.exists() and place.samefile(file):
            raise MlxAuditError(
                f"this would write over what is {how}",
                where=f"{option} {place.name}",
                found=file,
                fix="name another file",
            )


def results(option: str, file: str, read: Iterable[Path]) -> Path:
    """Return where results go; an existing file that is no JSON is somebody else's."""
    place = _choices.output(option, file)
    require_no_input(option, place, read)
    _require_begin(option, place, (b"{",), "a new file, or one that begins with {", "name another file")
    return place


def report(option: str, file: str, read: Iterable[Path], begin: bytes) -> Path:
    """Return where a report goes; an existing file that does not begin as its format does is somebody else's."""
    place = _choices.output(option, file)
    require_no_input(option, place, read, "reported")
    _require_begin(
        option, place, (begin,), f"a new file, or one that begins with {begin.decode()}", "name another file"
    )
    return place


def patch(option: str, file: Path, read: Iterable[Path], *, force: bool) -> Path:
    """Return where a patch goes; an existing file that is no patch of ours needs `--force`."""
    place = _choices.output(option, file)
    require_no_input(option, place, read)
    if not force:
        allowed = "a new file, or a patch that adapt made"
        fix = "name another file, or add --force"
        _require_begin(option, place, (_PATCH, _QUOTED_PATCH), allowed, fix)
    return place


def compared(file: Path) -> Path:
    """Return a file that `--check` reads; a device or a huge file would never come to an end."""
    if file.exists() and (not file.is_file() or file.stat().st_size > MOST_COMPARED):
        allowed = f"a regular file of at most {MOST_COMPARED} bytes"
        raise MlxAuditError("this cannot be compared", where=f"--check {file}", allowed=allowed)
    return file


def _require_begin(option: str, place: Path, begins: tuple[bytes, ...], allowed: str, fix: str) -> None:
    # Standard output that goes to a file is a file too, but not one that would be replaced.
    if place.parent == Path("/dev") or not place.is_file():
        return
    try:
        with place.open("rb") as file:
            begin = file.read(max(map(len, begins)))
    except OSError as error:
        raise MlxAuditError(
            "the file that is there cannot be read", where=f"{option} {place}", found=error.strerror
        ) from error
    if begin and not begin.startswith(begins):
        raise MlxAuditError(
            "the file that is there was not made by mlx-audit",
            where=f"{option} {place}",
            allowed=allowed,
            fix=fix,
        )
