"""The work of a child process: every planned check of one target, told event by event."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from mlx_audit.adapters import snapshots_reused
from mlx_audit.audit.eager import require_runs
from mlx_audit.audit.events import (
    CheckFinished,
    CheckStarted,
    Done,
    Event,
    Failed,
    Planned,
    SubjectFinished,
    SubjectStarted,
)
from mlx_audit.audit.plan import Entry, make_plan
from mlx_audit.audit.planting import planted_by_environment
from mlx_audit.audit.request import Request
from mlx_audit.checks.base import Check, execute, execute_reading
from mlx_audit.checks.subject import Subject
from mlx_audit.errors import MlxAuditError, TargetError, storable
from mlx_audit.evidence.environment import environment
from mlx_audit.evidence.registered import adapter_digest
from mlx_audit.evidence.results import CheckResult, Status
from mlx_audit.faults import DoesNotApply, planted

Emit = Callable[[Event], None]


def audit(request: Request, emit: Emit) -> None:
    """Run every planned check of one target."""
    try:
        _audit(request, emit)
    except MlxAuditError as error:
        emit(Failed(message=str(error), exit_code=error.exit_code))


def _audit(request: Request, emit: Emit) -> None:
    plan = make_plan(request)
    subjects = [entry.planned for entry in plan.entries]
    adapter = (adapter_digest(request.module) if request.module is not None else None) or ""
    emit(Planned(environment=environment(), subjects=subjects, skipped=plan.skipped, adapter=adapter))
    results: list[dict[str, CheckResult]] = []
    everywhere, chosen = planted_by_environment(), dict[bool, int]()
    for index, entry in enumerate(plan.entries):
        before = results[entry.after] if entry.after is not None else {}
        try:
            with snapshots_reused(), planted(entry.fault or everywhere, _module(entry)):
                results.append(_subject(index, entry, before, emit))
        except DoesNotApply as reason:
            results.append(_left_out(index, entry, str(reason), emit))
        if request.options.repro and _failures(entry, results[-1]):
            chosen.setdefault(entry.planned.claimed == "undecided", index)
        if index not in chosen.values():
            entry.subject = None  # models go as soon as they are not needed
    if chosen:  # last, so that every check has its result should making it smaller end the process
        index = chosen[min(chosen)]  # a failure that breaks a claim, before one of what is claimed undecided
        entry = plan.entries[index]
        with snapshots_reused(), planted(entry.fault or everywhere, _module(entry)):
            _reproduce(index, entry, results[index], emit)
    emit(Done())


def _module(entry: Entry) -> ModuleType | None:
    return entry.subject.module if entry.subject is not None else None


def _failures(entry: Entry, results: Mapping[str, CheckResult]) -> list[CheckResult]:
    return [results[check.code] for check in entry.checks if results[check.code].status == "fail"]


def _subject(
    index: int, entry: Entry, before: Mapping[str, CheckResult], emit: Emit
) -> dict[str, CheckResult]:
    """Run the checks of one subject and return their results by code.

    Raises:
        TargetError: the model itself cannot run the configuration.
    """
    started = time.perf_counter()
    emit(SubjectStarted(subject=index))
    done, ran, why_not = dict(before), False, ""
    for check in entry.checks:
        emit(CheckStarted(subject=index, code=check.code))
        # Inside the check, so that a crash or a hang is put down to it.
        if check.tier != "static" and not ran and entry.subject is not None:
            ran = True
            if entry.planned.claimed != "undecided" and not entry.alone:
                why_not = _cannot_run(entry.subject, done)
        if why_not:
            done[check.code] = _result(check, "not-run", why_not)
        else:
            done[check.code] = _check(check, entry, {} if entry.alone else done)
        emit(CheckFinished(subject=index, check=done[check.code]))
    emit(SubjectFinished(subject=index, seconds=round(time.perf_counter() - started, 3)))
    return done


def _cannot_run(subject: Subject, done: Mapping[str, CheckResult]) -> str:
    """Return why the model cannot run, where reading it has shown a fault already; empty where it runs.

    Raises:
        TargetError: it cannot run, and nothing else is known of it.
    """
    try:
        require_runs(subject)
    except TargetError as error:
        if all(result.status != "fail" for result in done.values()):
            raise
        return storable(error)
    return ""


def _reproduce(index: int, entry: Entry, results: Mapping[str, CheckResult], emit: Emit) -> None:
    from mlx_audit.audit.reproduction import reproduced  # which loads a template engine

    assert entry.subject is not None
    emit(reproduced(index, entry.subject, _failures(entry, results)))


def _left_out(index: int, entry: Entry, reason: str, emit: Emit) -> dict[str, CheckResult]:
    """Say of each check that it has nothing to look at: the fault has no place in this model."""
    emit(SubjectStarted(subject=index))
    done = {}
    for check in entry.checks:
        emit(CheckStarted(subject=index, code=check.code))
        done[check.code] = _result(check, "not-applicable", reason)
        emit(CheckFinished(subject=index, check=done[check.code]))
    emit(SubjectFinished(subject=index, seconds=0.0))
    return done


def _result(check: Check, status: Status, reason: str) -> CheckResult:
    return CheckResult(code=check.code, name=check.name, tier=check.tier, status=status, reason=reason)


def _check(check: Check, entry: Entry, done: Mapping[str, CheckResult]) -> CheckResult:
    if entry.subject is None:
        assert entry.source is not None, "what cannot be run can be read"
        result = execute_reading(check, entry.source, entry.blocked)
    else:
        result = execute(check, entry.subject, done, locate=not entry.alone)
    where = storable(result.where) if result.where is not None else None
    text = {"reason": storable(result.reason), "where": where}
    return result.model_copy(update={"figures": plain(result.figures), **text})


def plain(value: Any) -> Any:
    """Return a value as JSON can carry it: no sets or tuples, numbers that are not finite as text."""
    if isinstance(value, Mapping):
        return {storable(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [
            plain(item) for item in (sorted(value, key=str) if isinstance(value, set | frozenset) else value)
        ]
    if value is None or type(value) in (bool, int):
        return value
    if isinstance(value, float):
        return float(value) if value - value == 0 else str(value)
    return storable(value)
