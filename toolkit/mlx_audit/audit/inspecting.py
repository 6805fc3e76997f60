"""The parent of `inspect`: the target's code runs in a child, which may crash, hang or end as it likes."""

from __future__ import annotations

import selectors
import time

from pydantic import BaseModel, ConfigDict

from mlx_audit.audit.inspected import Inspection
from mlx_audit.audit.process import Child, death
from mlx_audit.audit.request import Request
from mlx_audit.errors import MlxAuditError

_LOOK_SECONDS = 0.2
_LONGEST_ANSWER = 16 << 20


class InspectionFailed(MlxAuditError):
    """The process that runs the target's code gave no answer."""

    exit_code = 1


class InspectionRefused(MlxAuditError):
    """The child's error, as it put it."""


class Answer(BaseModel):
    """What the child answers: inspections, or an error."""

    model_config = ConfigDict(extra="forbid")

    inspections: list[Inspection] = []
    error: str | None = None
    exit_code: int = 0


def inspect_in_child(request: Request, timeout: float) -> tuple[list[Inspection], str]:
    """Return the inspections of a target, and what its code printed.

    Raises:
        InspectionFailed: the process died, took too long, or answered nonsense.
        InspectionRefused: the target cannot be inspected.
    """
    child = Child("mlx_audit.audit.inspector")
    try:
        child.send(request.model_dump_json())
        answer = _answer(_line(child, request, timeout), child, request)
        child.drain_errors()
    finally:
        child.kill()
    if answer.error is not None:
        refused = InspectionRefused(answer.error)
        refused.exit_code = 1 if answer.exit_code == 1 else 2
        raise refused
    return answer.inspections, child.errors_tail


def _line(child: Child, request: Request, timeout: float) -> bytes:
    """Wait for the answer, the end of the process, or the time-out."""
    deadline, line = time.monotonic() + timeout, b""
    with selectors.DefaultSelector() as selector:
        selector.register(child.events, selectors.EVENT_READ)
        while time.monotonic() < deadline:
            over = child.is_over
            selector.select(0 if over else min(_LOOK_SECONDS, max(0.0, deadline - time.monotonic())))
            child.drain_errors()
            part = child.read()
            line += part or b""
            if b"\n" in line or len(line) > _LONGEST_ANSWER:
                return line.partition(b"\n")[0]
            if part == b"" or (over and part is None):
                raise _failed(f"the process {death(child.end())}", child, request)
    child.abort()
    time.sleep(_LOOK_SECONDS)
    child.drain_errors()
    raise _failed(f"the process was stopped after {timeout:g} s (time-out)", child, request)


def _answer(line: bytes, child: Child, request: Request) -> Answer:
    try:
        return Answer.model_validate_json(child.opened(line))
    except ValueError:
        raise _failed("the process wrote to the event channel", child, request) from None


def _failed(how: str, child: Child, request: Request) -> InspectionFailed:
    return InspectionFailed(
        f"{how} while the model was inspected",
        where=child.where or request.text,
        found=child.last_line or None,
    )
