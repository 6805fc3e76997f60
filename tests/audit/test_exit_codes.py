"""The exit code: a table."""

from __future__ import annotations

from typing import Any

import pytest

from mlx_audit.audit.exit_codes import CLAIM_FAILED, HOLDS, NOTHING, UNDECIDED, USAGE, code_of, combine
from mlx_audit.evidence.results import CheckResult, ClaimResult, Result

VERDICTS = ("capable", "limited", "not-capable", "undecided")

FULL = {
    None: (HOLDS, HOLDS, CLAIM_FAILED, UNDECIDED),
    "capable": (HOLDS, HOLDS, CLAIM_FAILED, UNDECIDED),
    "limited": (HOLDS, HOLDS, CLAIM_FAILED, UNDECIDED),
    "not-capable": (CLAIM_FAILED, CLAIM_FAILED, HOLDS, UNDECIDED),
    "undecided": (HOLDS, HOLDS, HOLDS, HOLDS),
}
"""By claim, one code a verdict."""

PARTIAL = [
    ((), NOTHING),
    (("not-applicable",), NOTHING),
    (("pass", "not-applicable"), HOLDS),
    (("pass", "not-run"), UNDECIDED),
    (("pass", "not-run", "fail"), CLAIM_FAILED),
]


def result(claimed: Any, verdict: Any, statuses: tuple[Any, ...] = ("pass",)) -> Result:
    checks = [
        CheckResult(code=f"AAA00{at}", name="", tier="trace", status=s) for at, s in enumerate(statuses)
    ]
    return Result(
        target="x",
        family="x",
        variant="v",
        configuration="c",
        verdict=verdict,
        claims={"compiled_decode": ClaimResult(claimed=claimed, verdict=verdict)},
        checks=checks,
    )


@pytest.mark.parametrize("claimed", FULL)
def test_a_full_run_is_judged_by_its_claim(claimed: Any) -> None:
    assert tuple(code_of(result(claimed, verdict)) for verdict in VERDICTS) == FULL[claimed]


@pytest.mark.parametrize(("statuses", "code"), PARTIAL)
@pytest.mark.parametrize("claimed", ["capable", "not-capable", None])
def test_selected_checks_alone_decide(claimed: Any, statuses: tuple[Any, ...], code: int) -> None:
    verdict = "not-capable" if "fail" in statuses else "undecided"
    assert code_of(result(claimed, verdict, statuses), partial=True) == code


@pytest.mark.parametrize("statuses", [("fail",), ("not-run",), ("pass",)])
def test_a_claim_undecided_moves_nothing_in_a_partial_run_either(statuses: tuple[Any, ...]) -> None:
    assert code_of(result("undecided", "undecided", statuses), partial=True) == HOLDS


def test_a_death_before_any_check_is_no_pass() -> None:
    assert code_of(result("capable", "not-capable", ()), partial=True) == CLAIM_FAILED


def test_a_result_without_claims_is_judged_by_its_verdict() -> None:
    assert code_of(result(None, "not-capable").model_copy(update={"claims": {}})) == CLAIM_FAILED


@pytest.mark.parametrize(
    ("codes", "wanted"),
    [
        ([], NOTHING),
        ([HOLDS, NOTHING], HOLDS),
        ([HOLDS, UNDECIDED], UNDECIDED),
        ([UNDECIDED, CLAIM_FAILED, HOLDS], CLAIM_FAILED),
        ([CLAIM_FAILED, USAGE, UNDECIDED], USAGE),
    ],
)
def test_several_targets(codes: list[int], wanted: int) -> None:
    assert combine(codes) == wanted
