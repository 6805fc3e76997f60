"""Items of pytest say the same as the exit code, and name what a failure comes down to."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from audited import check, healthy
from mlx_audit.audit.exit_codes import HOLDS, code_of, combine
from mlx_audit.audit.items import VERDICT, failure_of, note_of
from mlx_audit.checks.base import execute
from mlx_audit.evidence.results import CheckResult, ClaimResult, Result
from mlx_audit.evidence.verdict import decide

CODES = ("TRC001", "PAR001", "STA001")
STATUSES = ("pass", "fail", "not-applicable", "not-run")
CLAIMS = ("capable", "limited", "not-capable", "undecided", None)


def result(claimed: str | None, statuses: list[str], configuration: str = "tiny", **reasons: str) -> Result:
    checks = [
        CheckResult(
            code=code, name="it holds", tier="numeric", status=status, reason=reasons.get(code, "why")
        )
        for code, status in zip(CODES, statuses, strict=True)
    ]
    name, reason = decide(checks, limits=["text only"] if claimed == "limited" else [])
    claim = ClaimResult.model_validate({"claimed": claimed, "verdict": name, "reason": reason})
    return Result(
        target="t", family="f", variant="v", configuration=configuration, verdict=name, reason=reason,
        claims={"compiled_decode": claim}, checks=checks,
    )  # fmt: skip


RESULTS = st.builds(
    result, st.sampled_from(CLAIMS), st.lists(st.sampled_from(STATUSES), min_size=3, max_size=3)
)


@given(st.lists(RESULTS, min_size=1, max_size=3))
def test_all_items_pass_exactly_when_the_exit_code_is_zero(results: list[Result]) -> None:
    failed = [item for item in (*CODES, VERDICT) if failure_of(item, results) is not None]
    assert (not failed) == (combine(map(code_of, results)) == HOLDS)
    assert not failed or VERDICT in failed


def test_what_does_not_apply_passes_and_says_so() -> None:
    results = [result("capable", ["pass", "not-applicable", "pass"], name) for name in ("tiny", "published")]
    assert failure_of("PAR001", results) is None
    assert note_of("PAR001", results) == "tiny: not applicable: why\n  also on: published"
    assert note_of("PAR001", [*results, result("capable", ["pass"] * 3)]) is None
    assert note_of(VERDICT, results) is None


def test_what_moves_nothing_is_said() -> None:
    undecided = result("undecided", ["pass", "not-run", "pass"], "tiny+dynamic")
    assert note_of("PAR001", [result("capable", ["pass"] * 3), undecided]) == (
        "tiny+dynamic: not run, where the claim is undecided: why"
    )
    refuted = [result("not-capable", ["fail", "pass", "pass"])]
    assert note_of("TRC001", refuted) == "tiny: failed, where the claim is not-capable: why"
    assert note_of("TRC001", [result("capable", ["fail", "pass", "pass"])]) is None


def test_a_failure_confirms_the_claim_not_capable() -> None:
    results = [result("not-capable", ["fail", "not-run", "pass"])]
    assert [failure_of(item, results) for item in (*CODES, VERDICT)] == [None] * 4


def test_a_claim_not_capable_that_is_not_confirmed_fails_in_the_verdict() -> None:
    failure = failure_of(VERDICT, [result("not-capable", ["pass", "pass", "pass"])])
    assert failure is not None
    assert failure.causes == {VERDICT}
    assert failure.text == "tiny: claimed not-capable, found capable: 3 checks passed"


def test_what_rests_on_a_failure_names_its_root() -> None:
    needs = {"PAR001": "needs TRC001, which failed", "STA001": "needs PAR001, which was not run"}
    results = [result("capable", ["fail", "not-run", "not-run"], **needs)]
    failures = {item: failure_of(item, results) for item in (*CODES, VERDICT)}
    assert {failure.causes for failure in failures.values() if failure is not None} == {frozenset({"TRC001"})}
    assert failures["STA001"] is not None
    assert failures["STA001"].text == "tiny: not run: it rests on TRC001, which failed"


def test_checks_word_what_they_need_as_it_is_read_here() -> None:
    failed = CheckResult(code="PAR001", name="n", tier="numeric", status="fail", reason="wrong")
    dependent = execute(check("PAR002"), healthy(), {"PAR001": failed})
    own = result("capable", ["pass", "fail", "pass"])
    failure = failure_of("PAR002", [own.model_copy(update={"checks": [*own.checks, dependent]})])
    assert failure is not None
    assert failure.causes == {"PAR001"}


def test_the_same_failure_is_told_once_with_all_its_configurations() -> None:
    results = [
        result("capable", ["fail", "pass", "pass"], name) for name in ("tiny", "tiny+yarn", "published")
    ]
    failure = failure_of("TRC001", results)
    assert failure is not None
    assert failure.text == "tiny: why\n  TRC001: it holds\n  also on: tiny+yarn, published"


def test_a_variant_without_results_fails_everywhere() -> None:
    assert failure_of("TRC001", []) is not None
    assert failure_of(VERDICT, []) is not None
    empty = result("capable", ["pass", "pass", "pass"]).model_copy(update={"checks": []})
    assert failure_of("TRC001", [empty]) is not None
