"""The parent of `inspect`: the target's code runs in a child, which may crash, hang or end as it likes."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, ValidationError

from mlx_audit.audit.asking import NoAnswer, Refused, ask
from mlx_audit.audit.inspected import Inspection
from mlx_audit.audit.request import Request

DOING = "inspected"


class Answer(BaseModel):
    """What the child answers: inspections, or an error."""

    model_config = ConfigDict(extra="forbid")

    inspections: list[Inspection] = []
    error: str | None = None
    exit_code: int = 0


def inspect_in_child(request: Request, timeout: float) -> tuple[list[Inspection], str]:
    """Return the inspections of a target, and what its code printed.

    Raises:
        NoAnswer: the process died, took too long, or answered nonsense.
        Refused: the target cannot be inspected.
    """
    line, printed = ask("mlx_audit.audit.inspector", request, timeout, DOING)
    try:
        answer = Answer.model_validate_json(line)
    except ValidationError:
        raise NoAnswer("the process gave no usable answer", where=request.text) from None
    if answer.error is not None:
        raise Refused(answer.error, 1 if answer.exit_code == 1 else 2)
    return answer.inspections, printed
