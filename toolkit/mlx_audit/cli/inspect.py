"""`mlx-audit inspect`: the topology as a layer strip, the cost of a step, and trace hazards."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mlx_audit.cli import _choices, _console

if TYPE_CHECKING:
    from rich.console import Console

    from mlx_audit.audit.inspected import Inspection

Target = Annotated[
    str, typer.Argument(metavar="TARGET", help="A family, manifest, model .py file, or checkpoint.")
]
Config = Annotated[Path | None, typer.Option("--config", help="A config.json instead of the manifest's own.")]
Json = Annotated[bool, typer.Option("--json", help="Write as JSON to stdout.")]
Timeout = Annotated[float, typer.Option("--timeout", min=0.1, help="Seconds that it may take.")]

STRIP = {
    "linear": ("█", "blue"),
    "rotating": ("▒", "yellow"),
    "chunked": ("▚", "cyan"),
    "quantized": ("▓", "green"),
    "arrays": ("░", "magenta"),
    "composite": ("▙", "red"),
    "none": ("·", "dim"),
}
"""Glyph and colour of each cache kind."""

_UNKNOWN = ("?", "bold red")


def inspect(target: Target, config: Config = None, json: Json = False, timeout: Timeout = 600.0) -> int:
    """Show the topology as a layer strip, the cost of a step, and what a trace finds; nothing is judged."""
    from mlx_audit.audit.inspecting import inspect_in_child
    from mlx_audit.audit.request import Options, Request
    from mlx_audit.models.target import resolve_target

    _choices.seconds("--timeout", timeout)
    resolved = resolve_target(_choices.target(target), config)
    request = Request.of(resolved, Options(tiers=["static", "trace"]), config)
    inspections, printed = inspect_in_child(request, timeout)
    # What the model's code prints must not mix with the answer.
    for line in printed.splitlines():
        _console.note(line)
    if json:
        _console.print_json({"target": target, "inspections": [item.to_dict() for item in inspections]})
    else:
        console = _console.stdout()
        for item in inspections:
            _show(console, item)
    return 0


def _show(console: Console, item: Inspection) -> None:
    from rich.text import Text

    claim = f"claimed {item.claimed}" if item.claimed is not None else "no claim"
    head = f"  {item.variant}  {item.configuration}  rope {item.rope}  {claim}"
    console.print(Text.assemble((item.family, "bold"), head))
    glyphs = [STRIP.get(layer.partition("(")[0], _UNKNOWN) for layer in item.layers]
    console.print(Text.assemble("  ", *glyphs))
    console.print(Text.assemble("  ", *_legend(item)))
    for cost in item.costs:
        from mlx_audit.cli._render import cost_line

        console.print(Text(f"  {cost_line(cost)}"))
    for hazard in item.hazards:
        console.print(Text(f"  ✕ {hazard}", "red"))
    if not item.hazards and item.costs:
        console.print(Text("  ● the same graph at every position and history", "green"))


def _legend(item: Inspection) -> list[tuple[str, str]]:
    """Each kind's glyph with its name, where it is in the strip, and how often."""
    parts: list[tuple[str, str]] = []
    for layer, count in item.counts().items():
        glyph, colour = STRIP.get(layer.partition("(")[0], _UNKNOWN)
        parts += [(f"{glyph} ", colour), (f"{layer} ×{count}   ", "")]
    return [*parts, (item.pattern(), "dim")]
