"""`mlx-audit explain`: what a check does, why it is needed, an example, how to fix, sources."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from mlx_audit.cli import _choices, _console

if TYPE_CHECKING:
    from mlx_audit.checks.base import Check

Code = Annotated[str | None, typer.Argument(metavar="CODE", help="Such as TRC001; without it, all codes.")]
Json = Annotated[bool, typer.Option("--json", help="Write as JSON to stdout.")]


def explain(code: Code = None, json: Json = False) -> int:
    """Explain a check, or list them all."""
    from mlx_audit.evidence.codes import known_codes

    if code is not None:
        _choices.one_of("CODE", code, known_codes())
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
        "requires": list(check.requires),
        "page": check.page,
    }


def _list(checks: list[Check]) -> None:
    from rich.text import Text

    console = _console.stdout()
    for check in checks:
        console.print(Text.assemble((check.code, "bold"), f"  {check.tier:<10}  {check.name}"))


def _page(check: Check) -> None:
    """The docstring as it is, its first line and its section titles made to stand out."""
    from rich.text import Text

    console = _console.stdout()
    first, *lines = check.page.splitlines()
    console.print(Text.assemble((check.code, "bold"), "  ", (first, "bold")))
    needs = f", needs {', '.join(check.requires)}" if check.requires else ""
    console.print(Text(f"{check.tier} tier{needs}", "dim"))
    for line in lines:
        title = line.endswith(":") and not line.startswith(" ")
        console.print(Text(line, "bold cyan" if title else ""))
