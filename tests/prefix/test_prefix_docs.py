"""The page on prefix reuse states the rules and reasons that the code has."""

from __future__ import annotations

from pathlib import Path

from mlx_audit.prefix.reasons import Reason
from mlx_audit.prefix.rules import table

PAGE = (Path(__file__).parents[2] / "docs" / "prefix.md").read_text(encoding="utf-8")


def test_the_page_has_the_table_of_rules() -> None:
    assert table() in PAGE


def test_the_page_has_every_reason_and_no_other() -> None:
    rows = PAGE[PAGE.index("## Reasons") :].splitlines()[4:]
    assert [row for row in rows if row] == [f"| `{reason.value}` | {reason.meaning} |" for reason in Reason]
