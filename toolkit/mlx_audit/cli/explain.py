"""`mlx-audit explain`: what a check does, why it is needed, an example, how to fix, sources."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from textwrap import wrap
from typing import TYPE_CHECKING, Annotated

import typer

from mlx_audit.cli import _choices, _console

if TYPE_CHECKING:
    from mlx_audit.checks.base import Check

Code = Annotated[str | None, typer.Argument(metavar="CODE", help="Such as TRC001; without it, all codes.")]
_PIPED = 80
"""Columns of a page away from a terminal."""

Json = Annotated[bool, typer.Option("--json", help="Write as JSON to stdout.")]


def explain(code: Code = None, json: Json = False) -> int:
    """Explain a check, or list them all."""
    from mlx_audit.evidence.codes import known_codes

    if code is not None:
        code = _choices.one_of("CODE", code.upper() if code.upper() in known_codes() else code, known_codes())
    checks = [check for check in _all_checks() if code in (None, check.code)]
    if json:
        pages = [_as_dict(check) for check in checks]
        _console.print_json(pages if code is None else pages[0])
    elif code is None:
        _list(checks)
    else:
        _page(checks[0])
    return 0


def _all_checks() -> tuple[Check, ...]:
    from mlx_audit.models.modules import defer_mlx_lm

    defer_mlx_lm()
    from mlx_audit.checks.base import all_checks

    return all_checks()


def _as_dict(check: Check) -> dict[str, object]:
    return {
        "code": check.code,
        "name": check.name,
        "tier": check.tier,
        "claim": check.claim,
        "requires": list(check.requires),
        "page": check.page,
    }


def _list(checks: list[Check]) -> None:
    from rich.text import Text

    console = _console.stdout()
    for check in checks:
        console.print(Text.assemble((check.code, "bold"), f"  {check.tier:<10}  {check.name}"))


def _page(check: Check) -> None:
    """The docstring in lines of the terminal's width, its first line and its section titles made to stand out."""
    from rich.text import Text

    from mlx_audit.evidence.codes import DECODE

    console = _console.stdout()
    width = console.width if console.is_terminal else _PIPED
    first, *lines = check.page.splitlines()
    indent = " " * (len(check.code) + 2)
    for line in wrap(f"{check.code}  {first}", width, subsequent_indent=indent, break_on_hyphens=False):
        console.print(Text(line, "bold"))
    needs = f", needs {', '.join(check.requires)}" if check.requires else ""
    claim = f", claim {check.claim}" if check.claim != DECODE else ""
    console.print(Text(f"{check.tier} tier{claim}{needs}", "dim"))
    for line in _reflowed(lines, width):
        title = line.endswith(":") and not line.startswith(" ")
        console.print(Text(line, "bold cyan" if title else ""))


def _reflowed(lines: list[str], width: int) -> Iterator[str]:
    """Join the lines of each paragraph of a section and break them anew; an example keeps its own lines."""
    section = ""
    for (indented, blank), group in groupby(lines, key=lambda line: (line.startswith(" "), not line.strip())):
        part = list(group)
        section = part[-1] if not (indented or blank) else section
        if blank or not indented:
            yield from part
            continue
        for text in part if section == "Example:" else [" ".join(line.strip() for line in part)]:
            yield from wrap(
                text.strip(),
                width,
                initial_indent="    ",
                subsequent_indent="    ",
                break_long_words=False,
                break_on_hyphens=False,
            )
