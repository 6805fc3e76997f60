"""What `gate` found as text: a line a claim, what changed and whom it concerns, and a last line with the counts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from mlx_audit.audit.exit_codes import CLAIM_FAILED, HOLDS, NOTHING, UNDECIDED
from mlx_audit.audit.gate import Gated, concerned
from mlx_audit.errors import clean
from mlx_audit.evidence.codes import DECODE
from mlx_audit.evidence.standing import Standing

if TYPE_CHECKING:
    from rich.console import Console

_SYMBOLS = {"holds": ("●", "green"), "undecided": ("?", "magenta")}
_FAILED = ("✕", "red")
_MEANINGS = {
    HOLDS: "all claims hold",
    CLAIM_FAILED: "a claim failed",
    NOTHING: "nothing was collected",
    UNDECIDED: "not all can be decided here",
}


def show(console: Console, gated: Sequence[Gated]) -> None:
    """Print the claims in columns; a RoPE kind whose claim stands as its variant's does is told on that line."""
    from rich.text import Text

    lines = [
        (standing, _reason(standing, one))
        for one in gated
        for standing in one.standings
        if _is_told(standing, one)
    ]
    rows = [_cells(standing) for standing, _ in lines]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for (standing, reason), cells in zip(lines, rows, strict=True):
        symbol, colour = _SYMBOLS.get(standing.state, _FAILED)
        padded = [cell.ljust(width) for cell, width in zip(cells, widths, strict=True)]
        line = Text.assemble((f"{symbol} {padded[0]}", colour), "  ", (padded[1], "bold"), "  ")
        line.append("  ".join([*padded[2:], reason]))
        console.print(line, soft_wrap=not console.is_terminal)
    for file, families in concerned(gated).items():
        text = f"{clean(file)} changed: it concerns {', '.join(map(clean, families))}"
        console.print(Text(text, "red"), soft_wrap=not console.is_terminal)


def summary(gated: Sequence[Gated], code: int, seconds: float) -> str:
    """The last line."""
    found = Counter(standing.state for one in gated for standing in one.standings)
    counts = ", ".join(f"{count} {state}" for state, count in found.items())
    claims = found.total()
    head = f"{claims} claim{'' if claims == 1 else 's'} in {seconds:.1f} s"
    if not counts:  # with exit code 0 nothing was touched, which is no claim that holds
        return f"{head}; {'nothing to gate' if code == HOLDS else _MEANINGS[code]}"
    return f"{head}: {counts}; {_MEANINGS[code]}"


def _cells(standing: Standing) -> tuple[str, ...]:
    return (
        standing.state,
        clean(f"{standing.family} {standing.variant}"),
        standing.claim.replace(".", " "),
        standing.claimed,
        standing.backend,
    )


def _reason(standing: Standing, one: Gated) -> str:
    kinds = [
        other.claim.removeprefix("rope.")
        for other in one.standings
        if other.variant == standing.variant and other.claim.startswith("rope.") and other.state == "holds"
    ]
    told = f", RoPE {', '.join(kinds)}" if kinds and standing.claim == DECODE else ""
    fix = f"; fix: {clean(standing.fix)}" if standing.fix else ""
    return f"{clean(standing.reason)}{told}{fix}"


def _is_told(standing: Standing, one: Gated) -> bool:
    """Whether a claim has a line of its own: a RoPE kind that holds, or fails as its variant does, has none."""
    if not standing.claim.startswith("rope."):
        return True
    decode = next(s for s in one.standings if s.variant == standing.variant and s.claim == DECODE)
    return standing.state not in ("holds", decode.state)
