"""The child process of `draft`: `python -m mlx_audit.audit.drafting_child FD` reads a request and answers by a line."""

from __future__ import annotations

from mlx_audit.audit.answering import refusal, serve
from mlx_audit.audit.drafting import DOING, Answer
from mlx_audit.audit.request import Request


def _answer(request: Request) -> str:
    from mlx_audit.audit.drafting_model import draft_request

    try:
        answer = Answer(draft=draft_request(request))
    except Exception as error:
        message, code = refusal(error, DOING)
        answer = Answer(error=message, exit_code=code)
    return answer.model_dump_json()


if __name__ == "__main__":
    serve(_answer)
