"""The event channel: what the target's code writes to it is that target's failure, never a result."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from mlx_audit.audit.assembly import WROTE, Assembly, ProtocolFault
from mlx_audit.audit.events import (
    CheckFinished,
    CheckStarted,
    Done,
    Event,
    Failed,
    Planned,
    PlannedCheck,
    PlannedSubject,
    Ready,
    SubjectFinished,
    SubjectStarted,
    read_event,
)
from mlx_audit.audit.exit_codes import CLAIM_FAILED, USAGE, code_of
from mlx_audit.audit.request import Options, Request
from mlx_audit.audit.runner import Outcome, run_audits
from mlx_audit.evidence.results import CheckResult, Environment
from mlx_audit.models.target import resolve_target
from model_files import FORWARD, write_config, write_model

CHEAP = Options(tiers=["static", "trace"])
WHERE = Environment(
    mlx_audit="0", mlx="0", mlx_lm="0", python="3", platform="p", backend="cpu", compiler=None
)


def request(model: Path, config: Path) -> Request:
    return Request.of(resolve_target(str(model), config), CHEAP, config)


def writes(line: bytes, times: int = 1) -> str:
    """Return the forward's line with a write to every descriptor before it."""
    return (
        "        import os\n        for fd in range(3, 20):\n            try:\n"
        f"                for _ in range({times}):\n                    os.write(fd, {line!r})\n"
        f"            except OSError:\n                pass\n{FORWARD}"
    )


def failing(outcome: Outcome) -> str:
    (result,) = outcome.results
    assert code_of(result) == CLAIM_FAILED
    return next(check.reason for check in result.checks if check.status == "fail")


@pytest.mark.parametrize(
    "line",
    [
        b'{"kind":"subject-finished","subject":99,"seconds":1}\n',
        b'{"kind":"failed","message":"forged","exit_code":0}\n',
        b'{"kind":"done"}\n',
        b"garbage\n",
        b'- {"kind":"ready"}\n',
    ],
)
def test_a_write_to_the_channel_fails_the_running_check_and_the_next_target_runs(
    tmp_path: Path, line: bytes
) -> None:
    config = write_config(tmp_path)
    forger = write_model(tmp_path, "forger", (FORWARD, writes(line)))
    healthy = write_model(tmp_path, "healthy")
    bad, good = run_audits([request(forger, config), request(healthy, config)], jobs=1)
    assert failing(bad).startswith(f"{WROTE} during ")
    assert {check.status for check in good.results[0].checks} <= {"pass", "not-applicable"}


def test_a_line_without_end_is_no_event(tmp_path: Path) -> None:
    model = write_model(tmp_path, "long", (FORWARD, writes(b"a" * 65536, times=300)))
    (outcome,) = run_audits([request(model, write_config(tmp_path))])
    assert failing(outcome).startswith(WROTE)


@pytest.mark.parametrize("harm", ["", "\nos._exit(3)\n"])
@pytest.mark.parametrize("group", ["", "    os.setsid()\n"])
def test_what_the_target_started_delays_nothing(tmp_path: Path, harm: str, group: str) -> None:
    start = f"\nimport os, time\nif os.fork() == 0:\n{group}    time.sleep(60)\n    os._exit(0)\n"
    model = write_model(tmp_path, "forks", more=start + harm)
    started = time.monotonic()
    (outcome,) = run_audits([request(model, write_config(tmp_path))])
    assert time.monotonic() - started < 30
    statuses = {check.status for check in outcome.results[0].checks if not check.code.startswith("SRC")}
    assert (statuses == {"not-run"}) == bool(harm)


def test_halves_of_surrogate_pairs_and_huge_messages_are_carried(tmp_path: Path) -> None:
    message = "'\\ud800' + 'x' * 5_000_000"
    raises = f"        if inputs.shape[1] == 1:\n            raise ValueError({message})\n{FORWARD}"
    model = write_model(tmp_path, "surrogate", (FORWARD, raises))
    (outcome,) = run_audits([request(model, write_config(tmp_path))])
    reason = failing(outcome)
    assert "\\ud800x" in reason
    assert len(reason) < 100_000


def test_a_configuration_that_the_model_refuses_is_a_configuration_error(tmp_path: Path) -> None:
    config = write_config(tmp_path)
    config.write_text(config.read_text().replace("{", '{"head_dim": 3, ', 1))
    model = write_model(tmp_path, "mine")
    (outcome,) = run_audits([request(model, config)])
    assert outcome.results == []
    assert outcome.failed is not None
    assert outcome.failed.exit_code == USAGE
    assert "the model itself cannot run this configuration" in outcome.failed.message
    assert "dims must be even" in outcome.failed.message
    assert "mine.py:" in outcome.failed.message or "mlx/" in outcome.failed.message


def planned() -> Assembly:
    made = Assembly(Request.of(resolve_target("qwen2"), Options()))
    made.receive(Ready())
    checks = [PlannedCheck(code="TRC001", name="it holds", tier="trace")]
    made.receive(
        Planned(
            environment=WHERE,
            subjects=[PlannedSubject(variant="full", configuration="tiny", claimed="capable", checks=checks)],
        )
    )
    return made


def finished(subject: int = 0, **changes: Any) -> CheckFinished:
    fields = {"code": "TRC001", "name": "it holds", "tier": "trace", "status": "pass", **changes}
    return CheckFinished(subject=subject, check=CheckResult.model_validate(fields))


@pytest.mark.parametrize(
    "event",
    [
        Ready(),
        Planned(environment=WHERE, subjects=[]),
        SubjectStarted(subject=99),
        SubjectStarted(subject=-1),
        SubjectFinished(subject=1, seconds=0),
        CheckStarted(subject=7, code="TRC001"),
        CheckStarted(subject=0, code="TRC002"),
        finished(),
        Done(),
    ],
)
def test_events_out_of_place_are_faults(event: Event) -> None:
    with pytest.raises(ProtocolFault):
        planned().receive(event)


@pytest.mark.parametrize("changes", [{"name": "other"}, {"tier": "numeric"}, {"code": "TRC002"}])
def test_a_result_must_be_that_of_the_running_check(changes: dict[str, str]) -> None:
    made = planned()
    made.receive(CheckStarted(subject=0, code="TRC001"))
    with pytest.raises(ProtocolFault):
        made.receive(Done())
    with pytest.raises(ProtocolFault):
        made.receive(finished(**changes))
    made.receive(finished())
    with pytest.raises(ProtocolFault):
        made.receive(CheckStarted(subject=0, code="TRC001"))


def test_a_plan_that_borrows_from_nowhere_is_a_fault() -> None:
    made = Assembly(Request.of(resolve_target("qwen2"), Options()))
    made.receive(Ready())
    nowhere = PlannedSubject(variant="full", configuration="tiny", borrows=[3])
    with pytest.raises(ProtocolFault):
        made.receive(Planned(environment=WHERE, subjects=[nowhere]))


def test_a_fault_after_the_last_check_is_still_a_failure() -> None:
    made = planned()
    made.receive(CheckStarted(subject=0, code="TRC001"))
    made.receive(finished())
    made.died(WROTE, None, "")
    assert [check.status for check in made.results()[0].checks] == ["fail"]


@pytest.mark.parametrize("code", [0, -1, 5])
def test_no_failed_has_the_exit_code_of_success(code: int) -> None:
    with pytest.raises(ValueError, match="exit_code"):
        Failed(message="no", exit_code=code)
    with pytest.raises(ValueError, match="exit_code"):
        read_event(f'{{"kind":"failed","message":"no","exit_code":{code}}}'.encode())
