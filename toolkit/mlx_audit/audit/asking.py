"""One question to a child process that runs a target's code: it may crash, hang or end as it likes."""

from __future__ import annotations

import selectors
import time
from typing import Protocol

from mlx_audit.audit.process import Child, death
from mlx_audit.errors import MlxAuditError

_LOOK_SECONDS = 0.2
_LONGEST_ANSWER = 16 << 20


class Asked(Protocol):
    """What a child is asked: a target, and what to do with it."""

    @property
    def text(self) -> str:
        """The target as the user typed it, for messages."""

    def model_dump_json(self) -> str:
        """Return the whole as one line."""


class NoAnswer(MlxAuditError):
    """The process that runs the target's code gave no answer."""

    exit_code = 1


class Refused(MlxAuditError):
    """The child's error, as it put it."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def ask(module: str, request: Asked, timeout: float, doing: str) -> tuple[bytes, str]:
    """Return a child's answer, and what the target's code printed.

    Args:
        module: What the child runs.
        request: What it is asked.
        timeout: Seconds that it may take.
        doing: What is done with the model, for messages: `inspected`.

    Raises:
        NoAnswer: the process died, took too long, or answered nonsense.
    """
    child = Child(module)
    try:
        child.send(request.model_dump_json())
        line = _line(child, request, timeout, doing)
        try:
            answer = child.opened(line)
        except ValueError:
            raise _failed("the process wrote to the event channel", child, request, doing) from None
        child.drain_errors()
    finally:
        child.kill()
    return answer, child.errors_tail


def _line(child: Child, request: Asked, timeout: float, doing: str) -> bytes:
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
                raise _failed(f"the process {death(child.end())}", child, request, doing)
    child.abort()
    time.sleep(_LOOK_SECONDS)
    child.drain_errors()
    raise _failed(f"the process was stopped after {timeout:g} s (time-out)", child, request, doing)


def _failed(how: str, child: Child, request: Asked, doing: str) -> NoAnswer:
    return NoAnswer(
        f"{how} while the model was {doing}",
        where=child.where or request.text,
        found=child.last_line or None,
    )
