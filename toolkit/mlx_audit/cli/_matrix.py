"""The kill matrix as text: a line a fault, a column a stack, and the checks that saw it."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from mlx_audit.audit.kill_matrix import KillMatrix, Planted
from mlx_audit.errors import clean

if TYPE_CHECKING:
    from rich.console import Console

_CELLS = {
    "killed": ("●", "green"),
    "survived": ("✕", "bold red"),
    "no place": ("–", "dim"),
    "blind": ("?", "yellow"),
}
_NONE = ("·", "dim")


def show(console: Console, matrix: KillMatrix) -> None:
    """Print the columns' names, one line a fault, and what went wrong."""
    from rich.text import Text

    rows = matrix.by_fault()
    width = max(map(len, rows), default=0)
    marks = [str(index) for index in range(1, len(matrix.stacks) + 1)]

    def print_(text: Text) -> None:
        console.print(text, soft_wrap=not console.is_terminal)

    print_(Text("  ".join(f"{mark} {clean(name)}" for mark, name in zip(marks, matrix.stacks, strict=True))))
    print_(
        Text(f"{'fault'.ljust(width)}  {' '.join(m.rjust(1) for m in marks)}  by      also seen by", "bold")
    )
    for name, cells in rows.items():
        line = Text(name.ljust(width) + "  ")
        for mark, stack in zip(marks, matrix.stacks, strict=True):
            symbol, style = _CELLS[cells[stack].fate] if stack in cells else _NONE
            line.append(symbol.rjust(len(mark)) + " ", style)
        line.append(f" {next(iter(cells.values())).fault.by}  {' '.join(_also(list(cells.values())))}")
        print_(line)
    for planted in matrix.survivors:
        print_(Text(_survived(planted), "red"))
    for stack, codes in matrix.unhealthy.items():
        print_(Text(f"{clean(stack)}: healthy, and yet {', '.join(codes)} not as expected", "yellow"))
    for text in matrix.failed:
        print_(Text(clean(text), "yellow"))


def summary(matrix: KillMatrix, seconds: float) -> str:
    """The last line."""
    kills = Counter(code for planted in matrix.planted for code in planted.killers)
    most = ", ".join(f"{code} {count}" for code, count in kills.most_common(6))
    killed, survived = len(matrix.killed), len(matrix.survivors)
    left = [one for one in matrix.planted if one.fate in ("no place", "blind")]
    places = f"{len(matrix.stacks)} topolog{'y' if len(matrix.stacks) == 1 else 'ies'}"
    return (
        f"{len(matrix.by_fault())} faults in {places}: {killed + survived} planted in {seconds:.0f} s, {killed} killed "
        f"by the check that is named for them, {survived} survived"
        + (
            f"; {len(left)} could not be shown (– no place in the model, ? its check fails anyway)"
            if left
            else ""
        )
        + (f"; most kills: {most}" if most else "")
    )


def _also(cells: list[Planted]) -> list[str]:
    """Return the other checks that fail on a fault, in some stack."""
    return sorted({code for cell in cells for code in cell.killers} - {cells[0].fault.by})


def _survived(planted: Planted) -> str:
    seen = f"; seen by {', '.join(planted.killers)}" if planted.killers else "; no check that was run sees it"
    status = planted.statuses.get(planted.fault.by, "not run")
    why = f" ({clean(planted.reason)})" if planted.reason else ""
    return f"✕ {planted.fault.name} in {clean(planted.stack)}: {planted.fault.by} says {status}{why}{seen}"
