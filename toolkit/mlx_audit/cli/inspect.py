"""`mlx-audit inspect`: the topology as a layer strip, the cost of a step, and trace hazards."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mlx_audit.cli import _choices, _console, _strip

if TYPE_CHECKING:
    from rich.console import Console

    from mlx_audit.audit.inspected import Inspection
    from mlx_audit.models.target import Target as ResolvedTarget

Target = Annotated[
    str, typer.Argument(metavar="TARGET", help="A family, manifest, model .py file, or checkpoint.")
]
Config = Annotated[Path | None, typer.Option("--config", help="A config.json instead of the manifest's own.")]
Json = Annotated[bool, typer.Option("--json", help="Write as JSON to stdout.")]
Timeout = Annotated[float, typer.Option("--timeout", min=0.1, help="Seconds that it may take.")]

_WIDTH = 80
_LABEL = 36
"""Columns of labels that stand in line with each other; a longer one has what it sees below it."""


def inspect(target: Target, config: Config = None, json: Json = False, timeout: Timeout = 600.0) -> int:
    """Show who reads the position, the topology as a layer strip, and what a trace finds; nothing is judged.

    The source of a model file, or of a family without a manifest, is read without --config too.
    """
    from mlx_audit.cli import _source
    from mlx_audit.models.target import resolve_target

    _choices.seconds("--timeout", timeout)
    resolved = resolve_target(_choices.target(target), config, bare=True)
    source = _source.read(resolved)
    if not json:
        _source.show(_console.stdout(), source)
    inspections = _inspections(resolved, config, timeout)
    if json:
        shown = [item.to_dict() for item in inspections]
        _console.print_json({"target": target, "source": _source.to_dict(source), "inspections": shown})
    for item in [] if json else inspections:
        _show(_console.stdout(), item)
    return 0


def _inspections(target: ResolvedTarget, config: Path | None, timeout: float) -> list[Inspection]:
    from mlx_audit.audit.inspecting import inspect_in_child
    from mlx_audit.audit.request import Options, Request

    if target.manifest is None and target.config is None:
        _console.note("the source alone: name a configuration with --config to see caches, costs and a trace")
        return []
    request = Request.of(target, Options(tiers=["static", "trace"]), config)
    inspections, printed = inspect_in_child(request, timeout)
    # What the model's code prints must not mix with the answer.
    for line in printed.splitlines():
        _console.note(line)
    return inspections


def _show(console: Console, item: Inspection) -> None:
    from rich.text import Text

    claim = f"claimed {item.claimed}" if item.claimed is not None else "no claim"
    console.print(Text.assemble((item.family, "bold"), f"  {item.variant}  {item.configuration}"))
    _print(console, f"{len(item.layers)} layers: {item.pattern()}", "  ")
    _print(console, f"rope {item.rope}, {claim}", "  ", "dim")
    for note in item.notes:
        _print(console, note, "  ", "yellow")
    console.print()
    _show_strip(console, item)
    console.print()
    _show_kinds(console, item)
    _show_costs(console, item)
    for hazard in item.hazards:
        console.print(Text(f"  ✕ {hazard}", "red"))
    if not item.hazards and item.costs:
        console.print(Text("  ● the same graph at every position and history", "green"))


def _show_strip(console: Console, item: Inspection) -> None:
    """Print one glyph a layer; each row begins with the number of its first layer."""
    from rich.text import Text

    glyphs = _strip.glyphs(item.counts())
    if item.before:
        console.print(Text.assemble(("before  ", "dim"), *(glyphs[label] for label in item.before)))
    for start, groups in _strip.rows(item.layers):
        row = Text(f"{start:6}  ", "dim")
        for group in groups:
            row.append_text(Text.assemble(*(glyphs[label] for label in group), " "))
        row.rstrip()
        console.print(row)


def _show_kinds(console: Console, item: Inspection) -> None:
    """Print how often each cache occurs, and which earlier tokens a token sees through it."""
    from rich.text import Text

    counts, glyphs = item.counts(), _strip.glyphs(item.counts())
    column = max((len(label) for label in counts if len(label) <= _LABEL), default=0)
    for label, count in counts.items():
        head = Text.assemble("  ", glyphs[label], f" {count:3} × ", label.ljust(column))
        sees = f"sees {item.sees.get(label, 'not known')}"
        if len(head) + 2 + len(sees) <= _WIDTH:
            console.print(Text.assemble(head, "  ", (sees, "dim")))
        else:
            head.rstrip()
            console.print(head)
            _print(console, sees, " " * 10, "dim")
    for name, mask in item.masks.items():
        _print(console, f"attention, {name}: {mask}", "  ", "dim")


def _show_costs(console: Console, item: Inspection) -> None:
    from mlx_audit.cli._render import growth, human_bytes

    if not item.costs:
        return
    first = item.costs[0]
    reads = (
        f"a step reads {human_bytes(first['weights_bytes'])} of weights in {first['primitives']:,} primitives"
    )
    at = [f"{human_bytes(cost['cache_bytes'])} at {cost['capacity']:,}" for cost in item.costs]
    _print(console, reads, "  ")
    _print(console, f"and of cache {', '.join(at)} tokens; {growth(item.costs[-1])}", "  ")


def _print(console: Console, text: str, indent: str, style: str = "") -> None:
    """Print a text in lines of at most 80 columns."""
    from textwrap import wrap

    from rich.text import Text

    for line in wrap(text, _WIDTH, initial_indent=indent, subsequent_indent=f"{indent}  "):
        console.print(Text(line, style))
