"""Output shared by the verbs: results to stdout, everything else to stderr.

Colour only on a terminal, and not with `NO_COLOR` or `CI` set; away from a terminal lines are never wrapped.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TextIO

from mlx_audit.errors import MOST_SHOWN, MlxAuditError, clean

if TYPE_CHECKING:
    from rich.console import Console

PIPE_CLOSED = 141
"""Exit code when the reader of stdout has gone, as shells have it: 128 and SIGPIPE. No verdict has it."""

_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")

WIDE = 10_000
"""Columns away from a terminal: more than any line has, so that nothing is wrapped or cut."""


def stdout() -> Console:
    """A rich console for results."""
    return _console(sys.stdout)


def stderr() -> Console:
    """A rich console for progress and errors."""
    return _console(sys.stderr)


def is_plain(stream: TextIO) -> bool:
    """Whether a stream gets text without colour: not a terminal, or `NO_COLOR`, `CI` or a dumb terminal."""
    quiet = any(os.environ.get(name) for name in ("NO_COLOR", "CI")) or os.environ.get("TERM") == "dumb"
    return quiet or not stream.isatty()


def _console(stream: TextIO) -> Console:
    from rich.console import Console
    from rich.text import Text

    class Safe(Console):
        """Never lets a control character of a text reach the terminal; styles do."""

        def print(self, *objects: Any, **options: Any) -> None:
            for item in objects:
                if isinstance(item, Text):
                    item.plain = _CONTROLS.sub("\ufffd", item.plain)
            super().print(*objects, **options)

    terminal = stream.isatty()
    plain = is_plain(stream)
    return Safe(
        file=stream,
        color_system=None if plain else "auto",
        force_terminal=terminal and not plain,
        no_color=plain,
        width=None if terminal else WIDE,
        highlight=False,
        emoji=False,
        soft_wrap=not terminal,
    )


def print_json(value: Mapping[str, object] | Sequence[object]) -> None:
    """Write a value as JSON to stdout, for scripts: plain, two spaces of indent, keys in the given order."""
    print(json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False))


def show_error(error: MlxAuditError) -> None:
    """Write an expected error to stderr: what, where, found, allowed, fix; never a traceback."""
    text = str(error)
    _write_lines(f"error: {text}" if "\n" not in text else text)


def note(text: str) -> None:
    """Write a line, or several, to stderr."""
    _write_lines(text)


def answer(part: str) -> None:
    """Write a piece of a model's text to stdout: as it is, but to a terminal without its control sequences."""
    safe = _CONTROLS.sub("\ufffd", part) if sys.stdout.isatty() else part
    print(safe, end="", flush=True)


def drop_stdout() -> int:
    """Stdout takes nothing more: send the rest nowhere, so that the interpreter's exit is quiet too."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    with contextlib.suppress(OSError, ValueError):
        os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)
    return PIPE_CLOSED


def open_streams() -> bool:
    """Give the standard streams that are closed something to be; False when stdout was one of them.

    Otherwise the next file that is opened, or a pipe to a child, would become stdout.
    """
    closed = []
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            closed.append(descriptor)
            os.open(os.devnull, os.O_RDWR)  # the lowest free number is this one
    sys.stdin = sys.stdin or open(0, encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stdout = sys.stdout or open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stderr = sys.stderr or open(2, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # such as a locale that has only ASCII
    return 1 not in closed


def _write_lines(text: str) -> None:
    """Write to stderr, each line cleaned; an stderr that takes nothing is no reason to fail."""
    with contextlib.suppress(OSError):
        for line in text.split("\n"):
            print(clean(line, 2 * MOST_SHOWN), file=sys.stderr)
        sys.stderr.flush()
