"""A failed check as text for people, the same on the command line and in pytest."""

from __future__ import annotations

from collections.abc import Iterator

from mlx_audit.errors import clean
from mlx_audit.evidence.results import CheckResult


def failure_lines(check: CheckResult) -> Iterator[tuple[str, str]]:
    """Yield lines with their style: what must hold, got and wanted, and the details."""
    yield f"{check.code} {check.name}", "red"
    yield f"  {clean(check.reason)}", ""
    yield from detail_lines(check)


def detail_lines(check: CheckResult) -> Iterator[tuple[str, str]]:
    """Yield lines with their style: where, the figures, and the command that shows it again."""
    if check.where:
        yield f"  at {clean(check.where)}", ""
    # The location is in the reason already, in words.
    figures = [f"{key} {_text(value)}" for key, value in check.figures.items() if key != "located"]
    if figures:
        yield f"  {clean(', '.join(figures))}", "dim"
    if check.reproduce:
        yield f"  reproduce: {clean(check.reproduce)}", "cyan"


def _text(value: object) -> str:
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return "; ".join(value)
    return f"{value:.6g}" if isinstance(value, float) else str(value)
