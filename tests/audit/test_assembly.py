"""Results from events, also when the events stop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mlx_audit import resources
from mlx_audit.audit.assembly import Assembly, ProtocolFault
from mlx_audit.audit.events import (
    CheckFinished,
    CheckStarted,
    Done,
    Planned,
    PlannedCheck,
    PlannedSubject,
    Ready,
    Reproduced,
    SubjectFinished,
    SubjectStarted,
)
from mlx_audit.audit.exit_codes import CLAIM_FAILED, UNDECIDED, code_of
from mlx_audit.audit.request import Options, Request
from mlx_audit.evidence.results import CheckResult, Environment
from mlx_audit.models.target import resolve_target

WHERE = Environment(
    mlx_audit="0", mlx="0", mlx_lm="0", python="3", platform="p", backend="cpu", compiler=None
)
TIERS: dict[str, Any] = {"TRC001": "trace", "PAR001": "numeric", "STA001": "numeric"}


def subject(configuration: str, *codes: str, **more: Any) -> PlannedSubject:
    checks = [PlannedCheck(code=code, name="it holds", tier=TIERS[code]) for code in codes]
    more = {"variant": "full", "claimed": "capable", **more}
    return PlannedSubject(configuration=configuration, checks=checks, **more)


def assembly(*subjects: PlannedSubject, config: Path | None = None, **options: Any) -> Assembly:
    made = Assembly(Request.of(resolve_target("qwen2", config), Options(**options), config))
    made.receive(Ready())
    made.receive(Planned(environment=WHERE, subjects=list(subjects)))
    return made


def finish(made: Assembly, index: int, code: str, status: Any = "pass", **more: Any) -> None:
    made.receive(CheckStarted(subject=index, code=code))
    check = CheckResult(code=code, name="it holds", tier=TIERS[code], status=status, **more)
    made.receive(CheckFinished(subject=index, check=check))


def test_a_complete_run() -> None:
    made = assembly(subject("tiny", "TRC001", "PAR001"))
    made.receive(SubjectStarted(subject=0))
    finish(made, 0, "TRC001")
    finish(made, 0, "PAR001")
    made.receive(SubjectFinished(subject=0, seconds=1.5))
    made.receive(Done())
    (result,) = made.results()
    assert made.ended
    assert (result.verdict, result.seconds, result.profile, result.seed) == ("capable", 1.5, "quick", 0)
    assert result.claims["compiled_decode"].claimed == "capable"
    assert set(result.digests) == {"model", "toolkit"}


def test_a_death_is_a_failure_of_the_running_check_and_the_rest_was_not_run() -> None:
    made = assembly(subject("tiny", "TRC001", "PAR001", "STA001"), subject("other", "TRC001"))
    finish(made, 0, "TRC001")
    made.receive(CheckStarted(subject=0, code="PAR001"))
    made.died("the process died with SIGABRT (signal 6)", "mine.py:7", "boom")
    first, second = made.results()
    assert [check.status for check in first.checks] == ["pass", "fail", "not-run"]
    failed, after = first.checks[1:]
    assert failed.reason == "the process died with SIGABRT (signal 6) during PAR001: boom"
    assert failed.where == "mine.py:7"
    assert failed.reproduce == "mlx-audit run qwen2 --only PAR001 --seed 0 --profile quick"
    assert after.reason == "the process died"
    assert (first.verdict, second.verdict) == ("not-capable", "undecided")
    assert (code_of(first), code_of(second)) == (CLAIM_FAILED, UNDECIDED)


def test_a_death_between_checks_is_put_on_the_next() -> None:
    made = assembly(subject("tiny", "TRC001", "PAR001"))
    finish(made, 0, "TRC001")
    made.died("the process ended with exit status 0", None, "")
    (result,) = made.results()
    assert [check.status for check in result.checks] == ["pass", "fail"]


def test_a_death_while_a_failure_is_made_smaller_changes_no_result() -> None:
    made = assembly(subject("tiny", "TRC001"), subject("other", "TRC001"), repro=True)
    finish(made, 0, "TRC001", "fail", reason="baked")
    finish(made, 1, "TRC001")
    made.died("the process died with SIGSEGV (signal 11)", None, "")
    assert [result.checks[0].status for result in made.results()] == ["fail", "pass"]
    assert made.results()[0].checks[0].reason == "baked"


def test_a_death_with_nothing_failed_never_passes() -> None:
    made = assembly(subject("tiny", "TRC001"), repro=True)
    finish(made, 0, "TRC001")
    made.died("the process died with SIGSEGV (signal 11)", None, "")
    assert made.results()[0].checks[0].status == "fail"


def test_a_script_is_taken_only_where_it_was_asked_for_and_something_failed() -> None:
    script = Reproduced(subject=0, code="TRC001", script="print()", meaning="nothing")
    for asked, status in [(False, "fail"), (True, "pass")]:
        made = assembly(subject("tiny", "TRC001"), repro=asked)
        finish(made, 0, "TRC001", status)
        with pytest.raises(ProtocolFault):
            made.receive(script)
    made = assembly(subject("tiny", "TRC001"), repro=True)
    finish(made, 0, "TRC001", "fail")
    made.receive(script)
    assert made.reproduced == script
    with pytest.raises(ProtocolFault):
        made.receive(script)


def test_a_death_before_the_plan_fails_every_claim() -> None:
    made = Assembly(Request.of(resolve_target("llama"), Options()))
    made.receive(Ready())
    made.died("the process died with SIGSEGV (signal 11)", None, "")
    results = made.results()
    assert [(r.variant, r.claims["compiled_decode"].claimed) for r in results] == [
        ("full", "capable"),
        ("sliding", "capable"),
    ]
    assert all(r.verdict == "not-capable" and "while the model was loaded" in r.reason for r in results)


def test_a_death_before_anything_was_asked_is_not_the_model_s_doing() -> None:
    made = Assembly(Request.of(resolve_target("llama"), Options()))
    made.died("the process ended with exit status 1", None, "ImportError: libmlx.so")
    assert made.failed is not None
    assert made.failed.exit_code == UNDECIDED
    assert "ImportError: libmlx.so" in made.failed.message


def test_numeric_checks_are_borrowed_from_the_nearest_tiny_one_that_has_them() -> None:
    made = assembly(
        subject("tiny", "PAR001", "STA001"),
        subject("tiny+yarn", "PAR001", "STA001"),
        subject("published", "TRC001", borrows=[1, 0], published=True),
    )
    finish(made, 0, "PAR001", figures={"n": 0})
    finish(made, 0, "STA001", figures={"n": 0})
    finish(made, 1, "PAR001", figures={"n": 1})
    finish(made, 1, "STA001", "not-applicable", reason="decided elsewhere")
    finish(made, 2, "TRC001")
    result = made.results()[2]
    assert [(c.code, c.figures) for c in result.checks] == [
        ("TRC001", {}),
        ("PAR001", {"on": "tiny+yarn", "n": 1}),
        ("STA001", {"on": "tiny", "n": 0}),
    ]
    assert result.verdict == "capable"


def test_a_failure_of_tiny_makes_every_configuration_not_capable() -> None:
    made = assembly(
        subject("tiny", "PAR001", reported=False), subject("given", "TRC001", borrows=[0], published=True)
    )
    finish(made, 0, "PAR001", "fail", reason="0.1 instead of 0.2")
    finish(made, 1, "TRC001")
    (result,) = made.results()
    assert result.configuration == "given"
    assert result.verdict == "not-capable"


def test_commands_that_reproduce_name_configuration_and_dtype() -> None:
    config = resources.model_audits() / "configurations" / "Qwen--Qwen2-7B.json"
    made = assembly(
        subject("Qwen--Qwen2-7B", "TRC001"), config=config, seed=3, profile="ci", dtype="bfloat16"
    )
    finish(made, 0, "TRC001", "fail")
    (result,) = made.results()
    wanted = f"mlx-audit run qwen2 --config {config} --only TRC001 --seed 3 --profile ci --dtype bfloat16"
    assert result.checks[0].reproduce == wanted
    made = assembly(subject("Qwen--Qwen2-7B", "TRC001", published=True))
    finish(made, 0, "TRC001", "fail")
    command = made.results()[0].checks[0].reproduce
    assert command is not None
    assert "configurations/Qwen--Qwen2-7B.json --only TRC001" in command


def test_a_partial_run_proves_nothing() -> None:
    made = assembly(subject("tiny", "TRC001"), only=["TRC001"])
    finish(made, 0, "TRC001")
    (result,) = made.results()
    assert (result.verdict, result.reason.partition(":")[0]) == ("undecided", "partial")
