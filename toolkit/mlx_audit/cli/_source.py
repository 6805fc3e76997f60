"""What reading a model's source shows: who consumes the position, and the lines that stand in the way."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from pathlib import Path
from textwrap import TextWrapper
from typing import TYPE_CHECKING, Any

from mlx_audit.errors import clean

if TYPE_CHECKING:
    from rich.console import Console

    from mlx_audit.models.target import Target
    from mlx_audit.source import Consumer, SourceReport

_WRAPPER = TextWrapper(
    80, initial_indent="  ", subsequent_indent="    ", break_long_words=False, break_on_hyphens=False
)
_MOST = 20
"""Hazards that are printed; `--json` has all."""


def read(target: Target) -> SourceReport:
    """Read a target's model file, and the helpers of mlx-lm that it imports; nothing is imported or run."""
    from mlx_audit.manifests.modules import module_file
    from mlx_audit.source import read_source

    file = target.file or module_file(Path(), target.module or "")
    return read_source(file or Path())


def to_dict(report: SourceReport) -> dict[str, Any]:
    """Return everything as plain data."""
    consumers = [{**asdict(item), "file": str(item.file), "where": item.where} for item in report.consumers]
    return {
        "file": str(report.file),
        "unreadable": report.unreadable,
        "notes": list(report.notes),
        "consumers": consumers,
    }


def show(console: Console, report: SourceReport) -> None:
    """Print hazards one by one, what could not be followed, and what is safe as counts."""
    from rich.text import Text

    console.print(Text.assemble(("source", "bold"), f"  {clean(report.file.name)}"))
    lines = [_line(hazard) for hazard in report.hazards[:_MOST]]
    if report.unreadable:
        lines.insert(0, (f"? cannot be followed: {report.unreadable}", "yellow"))
    if len(report.hazards) > _MOST:
        lines.append((f"… and {len(report.hazards) - _MOST} more; --json has all", "dim"))
    lines += [(f"not followed: {note}", "dim") for note in report.notes[:_MOST]]
    if report.safe:
        kinds = Counter(item.kind for item in report.safe)
        counts = ", ".join(f"{count} × {kind}" for kind, count in kinds.most_common())
        lines.append((f"● stays in the graph: {counts}", "green"))
    for text, style in lines:
        for line in _WRAPPER.wrap(clean(text)):
            console.print(Text(line, style), soft_wrap=True)
    console.print()


def _line(hazard: Consumer) -> tuple[str, str]:
    condition = hazard.when or ", ".join(need.rpartition(".")[2] for need in hazard.needs)
    sign, style = ("?", "yellow") if condition else ("✕", "red")
    when = f" (only when {condition})" if condition else ""
    return f"{sign} {hazard.where} {hazard.code} {hazard.kind}: {hazard.what}{when}", style
