"""Output shared by the verbs: results to stdout, everything else to stderr.

Colour only on a terminal, and not with `NO_COLOR` or `CI` set; away from a terminal lines are never wrapped.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, TextIO

from mlx_audit.errors import MlxAuditError

if TYPE_CHECKING:
    from rich.console import Console

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

    terminal = stream.isatty()
    plain = is_plain(stream)
    return Console(
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
    print(f"error: {error}" if "\n" not in str(error) else str(error), file=sys.stderr)


def note(text: str) -> None:
    """Write one line to stderr."""
    print(text, file=sys.stderr)


def drop_stdout() -> int:
    """The reader of stdout has gone: send the rest nowhere, so that the interpreter's exit is quiet too."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 1
