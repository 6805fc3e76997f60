"""The child's side of one question: read a request, answer by one line, and end."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

from mlx_audit.audit.child import channels, read_request, set_environment, write
from mlx_audit.audit.request import Request
from mlx_audit.errors import MlxAuditError, TargetError, describe, storable


def serve(answer: Callable[[Request], str]) -> None:
    """Serve one request and end the process."""
    channel, requests = channels(int(sys.argv[1]))
    set_environment()
    from mlx_audit.models.modules import defer_mlx_lm

    defer_mlx_lm()
    seal, line = read_request(requests)
    write(channel, seal, answer(Request.model_validate_json(line)).encode() + b"\n")
    os._exit(0)


def refusal(error: Exception, doing: str) -> tuple[str, int]:
    """Return what an exception says, and its exit code; one of the model's own names its line."""
    from mlx_audit.tracing.tracer import source_line

    if not isinstance(error, MlxAuditError):
        what = f"the model cannot be {doing}"
        error = TargetError(what, where=source_line(error), found=describe(error))
    return storable(error), error.exit_code
