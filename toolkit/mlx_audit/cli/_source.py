"""What reading a model's source shows: who consumes the position, and the lines that stand in the way."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

    from mlx_audit.models.target import Target
    from mlx_audit.source import Consumer, SourceReport

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
    """Print hazards line by line, and what is safe as counts."""
    from rich.text import Text

    console.print(Text.assemble(("source", "bold"), f"  {report.file.name}"))
    if report.unreadable:
        console.print(Text(f"  ? cannot be followed: {report.unreadable}", "yellow"))
    for hazard in report.hazards[:_MOST]:
        console.print(_line(hazard))
    if len(report.hazards) > _MOST:
        console.print(Text(f"  … and {len(report.hazards) - _MOST} more; --json has all", "dim"))
    if report.safe:
        kinds = Counter(item.kind for item in report.safe)
        counts = ", ".join(f"{count} × {kind}" for kind, count in kinds.most_common())
        console.print(Text(f"  ● stays in the graph: {counts}", "green"))
    console.print()


def _line(hazard: Consumer) -> Any:
    from rich.text import Text

    condition = hazard.when or ", ".join(need.rpartition(".")[2] for need in hazard.needs)
    sign, style = ("?", "yellow") if condition else ("✕", "red")
    when = f" (only when {condition})" if condition else ""
    return Text(f"  {sign} {hazard.where} {hazard.code} {hazard.kind}: {hazard.what}{when}", style)
