"""The child process of an audit: `python -m mlx_audit.audit.child FD` reads a request, and writes events to FD.

A crash, a hang or a print of the model's code stays in here. The imports run before the request is read, so that a
parent can start a child while it still resolves its targets.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

os.environ["MLX_ENABLE_TF32"] = "0"
os.environ["HF_HUB_OFFLINE"] = "1"

from mlx_audit.models.modules import defer_mlx_lm

defer_mlx_lm()

from mlx_audit.audit.events import (
    CheckFinished,
    CheckStarted,
    Done,
    Event,
    Failed,
    Planned,
    Ready,
    SubjectFinished,
    SubjectStarted,
    write_event,
)
from mlx_audit.audit.plan import Entry, make_plan
from mlx_audit.audit.request import Request
from mlx_audit.checks.base import Check, all_checks, execute
from mlx_audit.errors import MlxAuditError
from mlx_audit.evidence.environment import environment
from mlx_audit.evidence.results import CheckResult

Emit = Callable[[Event], None]


def audit(request: Request, emit: Emit) -> None:
    """Run every planned check of one target."""
    try:
        plan = make_plan(request)
    except MlxAuditError as error:
        emit(Failed(message=str(error), exit_code=error.exit_code))
        return
    subjects = [entry.planned for entry in plan.entries]
    emit(Planned(environment=environment(), subjects=subjects, skipped=plan.skipped))
    results: list[dict[str, CheckResult]] = []
    for index, entry in enumerate(plan.entries):
        before = results[entry.after] if entry.after is not None else {}
        results.append(_subject(index, entry, before, emit))
        entry.subject = None  # models go as soon as they are not needed
    emit(Done())


def _subject(
    index: int, entry: Entry, before: Mapping[str, CheckResult], emit: Emit
) -> dict[str, CheckResult]:
    """Run the checks of one subject and return their results by code."""
    started = time.perf_counter()
    emit(SubjectStarted(subject=index))
    done = dict(before)
    for check in entry.checks:
        emit(CheckStarted(subject=index, code=check.code))
        done[check.code] = _check(check, entry, done)
        emit(CheckFinished(subject=index, check=done[check.code]))
    emit(SubjectFinished(subject=index, seconds=round(time.perf_counter() - started, 3)))
    return done


def _check(check: Check, entry: Entry, done: Mapping[str, CheckResult]) -> CheckResult:
    if entry.subject is None:
        return CheckResult(
            code=check.code, name=check.name, tier=check.tier, status="not-run", reason=entry.blocked
        )
    result = execute(check, entry.subject, done)
    return result.model_copy(update={"figures": plain(result.figures)})


def plain(value: Any) -> Any:
    """Return a value as JSON can carry it: no sets or tuples, numbers that are not finite as text."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [
            plain(item) for item in (sorted(value, key=str) if isinstance(value, set | frozenset) else value)
        ]
    if value is None or type(value) in (bool, int, str):
        return value
    if isinstance(value, float):
        return float(value) if value - value == 0 else str(value)
    return str(value)


def main() -> None:
    """Serve one request and end."""
    channel = int(sys.argv[1])
    os.set_inheritable(channel, False)
    # What the model prints must not reach the results, and what it reads must not be the request.
    os.dup2(2, 1)
    requests = os.dup(0)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    all_checks()

    def emit(event: Event) -> None:
        data = write_event(event)
        while data:
            data = data[os.write(channel, data) :]

    emit(Ready())
    audit(_request(requests), emit)
    # Not sys.exit: nothing is left to do, and tearing down arrays and threads takes its time.
    os._exit(0)


def _request(requests: int) -> Request:
    """Read the request, and from then on watch for the end of the parent."""
    line = b""
    while not line.endswith(b"\n"):
        part = os.read(requests, 1 << 16)
        if not part:
            os._exit(0)  # the parent has no work after all
        line += part
    threading.Thread(target=_end_with_parent, args=(requests,), daemon=True).start()
    return Request.model_validate_json(line)


def _end_with_parent(requests: int) -> None:
    """End when the parent is gone, even if it was killed: its end of the pipe closes."""
    while os.read(requests, 1 << 16):
        pass
    os._exit(1)


if __name__ == "__main__":
    main()
