"""A bar a target on stderr while an audit runs; nothing at all away from a terminal."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from mlx_audit.audit.assembly import Assembly
from mlx_audit.audit.events import CheckFinished, CheckStarted, Event, Planned, Ready
from mlx_audit.audit.runner import Listener
from mlx_audit.cli import _console
from mlx_audit.errors import clean

_WIDEST = 200
"""Characters of a bar's description."""


@contextmanager
def progress() -> Iterator[Listener]:
    """Yield what to tell of each event; it shows nothing where nobody watches."""
    if not sys.stderr.isatty() or _console.is_plain(sys.stderr):
        yield _import_early
        return
    from rich.markup import escape
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=_console.stderr(), transient=True) as bars:
        tasks = {}

        def listen(assembly: Assembly, event: Event) -> None:
            if isinstance(event, Planned):
                total = sum(len(subject.checks) for subject in event.subjects)
                tasks[id(assembly)] = bars.add_task(
                    escape(clean(assembly.request.text, _WIDEST)), total=total
                )
            elif isinstance(event, CheckStarted):
                shown = escape(clean(f"{assembly.request.text}  {event.code}  {assembly.current}", _WIDEST))
                bars.update(tasks[id(assembly)], description=shown)
            elif isinstance(event, CheckFinished):
                bars.advance(tasks[id(assembly)])

        yield listen


def _import_early(_: Assembly, event: Event) -> None:
    """Load what prints the results while the child works: its time is then not waited for."""
    if isinstance(event, Ready):
        import rich.console
        import rich.text  # noqa: F401
