"""The parent of `draft`: the target's code runs in a child, which may crash, hang or end as it likes."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, ValidationError

from mlx_audit.audit.asking import NoAnswer, Refused, ask
from mlx_audit.audit.request import Request
from mlx_audit.manifests.drafting import Draft

DOING = "drafted"


class Answer(BaseModel):
    """What the child answers: a draft, or an error."""

    model_config = ConfigDict(extra="forbid")

    draft: Draft | None = None
    error: str | None = None
    exit_code: int = 0


def draft_in_child(request: Request, timeout: float) -> tuple[Draft, str]:
    """Return the draft of a target, and what its code printed.

    Raises:
        NoAnswer: the process died, took too long, or answered nonsense.
        Refused: nothing can be drafted; says what stands in the way.
    """
    line, printed = ask("mlx_audit.audit.drafting_child", request, timeout, DOING)
    try:
        answer = Answer.model_validate_json(line)
    except ValidationError:
        raise NoAnswer("the process gave no usable answer", where=request.text) from None
    if answer.draft is None:
        raise Refused(answer.error or "", answer.exit_code if answer.exit_code in (1, 4) else 2)
    return answer.draft, printed
