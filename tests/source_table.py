"""The table of hazards in docs/source.md, made by reading every model file of the installed mlx-lm.

Run this file to write it.
"""

from __future__ import annotations

from collections import defaultdict
from functools import cache
from importlib.metadata import version
from pathlib import Path

from mlx_audit.source import SourceReport, read_source
from mlx_audit.source.modules import models_folder

DOCUMENT = Path(__file__).parents[1] / "docs" / "source.md"
BEGIN, END = "<!-- hazards: begin -->\n", "<!-- hazards: end -->\n"


@cache
def zoo() -> dict[str, SourceReport]:
    """Return the report of every file in `mlx_lm/models` that defines a model, by family."""
    folder = models_folder()
    assert folder is not None
    reports = {file.stem: read_source(file) for file in sorted(folder.glob("*.py"))}
    return {name: report for name, report in reports.items() if "no class Model" not in report.unreadable}


def hazard_table() -> str:
    """Return the table: one row a place, with the families that reach it."""
    families: dict[tuple[str, int, str, str, str], set[str]] = defaultdict(set)
    whens: dict[tuple[str, int, str, str, str], set[str]] = defaultdict(set)
    for family, report in zoo().items():
        for hazard in report.hazards:
            place = hazard.file.name, hazard.line, hazard.code, hazard.kind, hazard.symbol
            families[place].add(family)
            whens[place].add(hazard.when)
    rows = [f"mlx-lm {version('mlx-lm')}, {len(zoo())} files that define a model:", ""]
    rows += ["| place | code | kind | in | reached | families |", "|---|---|---|---|---|---|"]
    for place in sorted(families):
        file, line, code, kind, symbol = place
        reached = min(whens[place], key=lambda when: (len(when), when))
        condition = f"`{reached}`" if reached else "always"
        named = sorted(families[place])
        listed = ", ".join(named) if len(named) <= 3 else f"{len(named)}: {', '.join(named)}"
        rows.append(f"| {file}:{line} | {code} | {kind} | `{symbol}` | {condition} | {listed} |")
    return "\n".join(rows) + "\n"


def with_table(text: str) -> str:
    """Return the document with the table as it is now."""
    before, rest = text.split(BEGIN)
    return before + BEGIN + hazard_table() + END + rest.split(END)[1]


if __name__ == "__main__":
    DOCUMENT.write_text(with_table(DOCUMENT.read_text(encoding="utf-8")), encoding="utf-8")
