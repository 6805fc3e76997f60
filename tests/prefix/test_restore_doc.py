"""docs/restore.md says what the code says: the rules, the reasons, and the checks of the claim."""

from __future__ import annotations

from pathlib import Path

from mlx_audit.checks.base import all_checks
from mlx_audit.evidence.codes import RESTORE
from mlx_audit.prefix import Reason, rules

PAGE = (Path(__file__).parents[2] / "docs" / "restore.md").read_text(encoding="utf-8")


def _rows(*rows: tuple[str, str]) -> str:
    return "".join(f"| `{code}` | {meaning} |\n" for code, meaning in rows)


def test_the_rules_are_those_of_the_table() -> None:
    assert rules.table() in PAGE


def test_every_reason_is_there_and_no_other() -> None:
    rows = _rows(*((reason.value, reason.meaning) for reason in Reason))
    assert f"| reason | means |\n|---|---|\n{rows}\n" in PAGE


def test_every_check_of_the_claim_is_there() -> None:
    rows = _rows(*sorted((check.code, check.name) for check in all_checks() if check.claim == RESTORE))
    assert f"| check | must hold |\n|---|---|\n{rows}\n" in PAGE
