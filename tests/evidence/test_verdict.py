"""The verdict rule, as one table."""

from __future__ import annotations

import pytest

from mlx_audit.evidence import CheckResult, decide
from mlx_audit.evidence.records import combine
from mlx_audit.evidence.results import TIERS
from mlx_audit.evidence.verdict import Verdict


def check(text: str, number: int) -> CheckResult:
    """Return the result that `status` or `tier:status` describes."""
    tier, _, status = text.rpartition(":")
    return CheckResult(
        code=f"XXX{number:03}",
        name=f"check {number}",
        tier=tier or "numeric",
        status=status,
        reason=f"why {number}",
    )


TABLE = [
    # checks, limits, partial, verdict, word of the reason
    ("pass", [], False, "capable", "1 checks passed"),
    ("pass pass static:pass trace:pass", [], False, "capable", "4 checks passed"),
    ("pass not-applicable", [], False, "capable", "1 checks passed"),
    ("pass", ["no padding"], False, "limited", "no padding"),
    ("pass", ["a", "b"], False, "limited", "a; b"),
    ("fail", [], False, "not-capable", "XXX000 check 0: why 0"),
    ("pass fail pass fail", [], False, "not-capable", "XXX001 check 1: why 1"),
    ("not-run fail", [], False, "not-capable", "XXX001"),
    ("fail", ["a"], False, "not-capable", "XXX000"),
    ("fail", [], True, "not-capable", "XXX000"),
    ("pass checkpoint:fail", [], False, "not-capable", "XXX001"),
    ("pass not-run", [], False, "undecided", "XXX001 was not run: why 1"),
    ("pass static:not-run", [], False, "undecided", "XXX001"),
    ("pass trace:not-run", ["a"], False, "undecided", "XXX001"),
    ("pass checkpoint:not-run", [], False, "capable", "1 checks passed"),
    ("pass checkpoint:not-run", ["a"], False, "limited", "a"),
    ("pass", [], True, "undecided", "partial"),
    ("pass", ["a"], True, "undecided", "partial"),
    ("pass not-run", [], True, "undecided", "partial"),
    ("", [], False, "undecided", "no check was run"),
    ("not-applicable", [], False, "undecided", "no check was run"),
    ("checkpoint:pass", [], False, "undecided", "no check was run"),
    ("checkpoint:not-run", [], False, "undecided", "no check was run"),
]


@pytest.mark.parametrize(("checks", "limits", "partial", "name", "reason"), TABLE, ids=range(len(TABLE)))
def test_rule(checks: str, limits: list[str], partial: bool, name: str, reason: str) -> None:
    results = [check(text, number) for number, text in enumerate(checks.split())]
    verdict = decide(results, limits=limits, partial=partial)
    assert verdict.name == name
    assert reason in verdict.reason


@pytest.mark.parametrize("tier", TIERS)
def test_a_failure_of_any_tier_decides(tier: str) -> None:
    assert decide([check("pass", 0), check(f"{tier}:fail", 1)]).name == "not-capable"


@pytest.mark.parametrize(
    ("names", "combined"),
    [
        (["capable", "capable"], "capable"),
        (["capable", "limited"], "limited"),
        (["limited", "undecided", "capable"], "undecided"),
        (["undecided", "not-capable"], "not-capable"),
        ([], "undecided"),
    ],
)
def test_the_weakest_configuration_decides_a_variant(names: list[str], combined: str) -> None:
    assert combine(Verdict(name, "") for name in names).name == combined  # type: ignore[arg-type]
