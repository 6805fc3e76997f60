"""Stamps on the command line: a bar while many bytes are read, and a line where one is stale."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from mlx_audit.cli import _console

if TYPE_CHECKING:
    from mlx_audit.evidence.file_hashes import Hashed, Listener

_SHOWN_AFTER = 2.0
"""Seconds after which somebody who watches wants to know how far it is."""


def note_stale(folder: Path | None, shown: str) -> None:
    """Say on stderr that a checkpoint folder bears a stamp that no longer matches.

    Args:
        folder: The checkpoint; None, or a file, has no stamp.
        shown: As the user typed it.
    """
    if folder is None or not folder.is_dir():
        return
    from mlx_audit.evidence.stamps import FILE, check_stamp, model_files, stale_text

    if not (folder / FILE).exists() and not (folder / FILE).is_symlink():
        return
    with _bar(folder, model_files(folder)) as listener:
        reasons = check_stamp(folder, listener)
    if reasons:
        _console.note(stale_text(folder, reasons, shown=shown))


def hashed(folder: Path, names: list[str]) -> dict[str, Hashed]:
    """Return size and digest of files, with a bar where it takes long and somebody watches."""
    from mlx_audit.evidence.file_hashes import hash_files

    with _bar(folder, names) as listener:
        return hash_files(folder, names, listener)


@contextlib.contextmanager
def _bar(folder: Path, names: list[str]) -> Iterator[Listener | None]:
    if not sys.stderr.isatty() or _console.is_plain(sys.stderr):
        yield None
        return
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn

    total = sum((folder / name).stat().st_size for name in names if (folder / name).is_file())
    columns = (TextColumn("reading the weights"), BarColumn(), DownloadColumn(), TimeElapsedColumn())
    bars = Progress(*columns, console=_console.stderr(), transient=True)
    task, started, read = bars.add_task("", total=total), time.monotonic(), 0

    def listen(count: int) -> None:
        nonlocal read
        read += count
        if time.monotonic() - started > _SHOWN_AFTER:
            bars.start()
            bars.update(task, completed=read)

    try:
        yield listen
    finally:
        bars.stop()
