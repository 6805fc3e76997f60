"""The child process of `inspect`: `python -m mlx_audit.audit.inspector FD` reads a request, and answers by one line."""

from __future__ import annotations

import os
import sys

from mlx_audit.audit.child import channels, read_request, set_environment, write
from mlx_audit.audit.inspecting import Answer
from mlx_audit.audit.request import Request
from mlx_audit.errors import MlxAuditError, TargetError, describe, storable


def main() -> None:
    """Serve one request and end."""
    channel, requests = channels(int(sys.argv[1]))
    set_environment()
    from mlx_audit.models.modules import defer_mlx_lm

    defer_mlx_lm()
    seal, line = read_request(requests)
    write(channel, seal, _answer(Request.model_validate_json(line)).model_dump_json().encode() + b"\n")
    os._exit(0)


def _answer(request: Request) -> Answer:
    from mlx_audit.audit.inspection import inspect_request
    from mlx_audit.tracing.tracer import source_line

    try:
        return Answer(inspections=inspect_request(request))
    except MlxAuditError as error:
        return Answer(error=storable(error), exit_code=error.exit_code)
    except Exception as error:
        refused = TargetError(
            "the model cannot be inspected", where=source_line(error), found=describe(error)
        )
        return Answer(error=storable(refused), exit_code=refused.exit_code)


if __name__ == "__main__":
    main()
