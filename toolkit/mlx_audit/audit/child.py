"""The child process of an audit: `python -m mlx_audit.audit.child FD` reads a request, and writes events to FD.

A crash, a hang or a print of the model's code stays in here. The imports are done before the request is read, so that
a parent can start a child while it still resolves its targets.
"""

from __future__ import annotations

import gc
import os
import sys
import tempfile
import threading
from pathlib import Path


def main() -> None:
    """Serve one request and end."""
    channel, requests = channels(int(sys.argv[1]))
    set_environment()
    gc.disable()  # what imports make stays
    from mlx_audit.models.modules import defer_mlx_lm

    defer_mlx_lm()
    from mlx_audit.audit.events import Event, Ready, write_event
    from mlx_audit.audit.process import READY
    from mlx_audit.audit.request import Request
    from mlx_audit.audit.scratch import enter_scratch, leave_scratch
    from mlx_audit.audit.worker import audit
    from mlx_audit.checks.base import all_checks

    all_checks()
    gc.freeze()
    gc.enable()

    write(channel, READY, write_event(Ready()))
    seal, request = read_request(requests)

    def emit(event: Event) -> None:
        write(channel, seal, write_event(event))

    enter_scratch()
    try:
        audit(Request.model_validate_json(request), emit)
    finally:
        leave_scratch()
    # Not sys.exit: nothing is left to do, and tearing down arrays and threads takes its time.
    os._exit(0)


def set_environment() -> None:
    """Set what libraries look at, before they are imported."""
    os.environ.update(MLX_ENABLE_TF32="0", HF_HUB_OFFLINE="1")
    # Hypothesis would leave a folder of its own in the working directory.
    os.environ.setdefault("HYPOTHESIS_STORAGE_DIRECTORY", str(_cache_folder() / "hypothesis"))


def write(channel: int, seal: bytes, line: bytes) -> None:
    """Write one sealed line to the parent."""
    data = seal + b" " + line
    while data:
        data = data[os.write(channel, data) :]


def _cache_folder() -> Path:
    home = os.environ.get("HOME")
    fallback = Path(home) / ".cache" if home else Path(tempfile.gettempdir())
    return Path(os.environ.get("XDG_CACHE_HOME") or fallback) / "mlx-audit"


def channels(channel: int) -> tuple[int, int]:
    """Return the descriptors of events and requests, out of reach of what the model prints and reads."""
    os.set_inheritable(channel, False)
    os.dup2(2, 1)
    requests = os.dup(0)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    return channel, requests


def read_request(requests: int) -> tuple[bytes, bytes]:
    """Read the seal of answers and the request, and from then on watch for the end of the parent."""
    line = b""
    while not line.endswith(b"\n"):
        part = os.read(requests, 1 << 16)
        if not part:
            os._exit(0)  # the parent has no work after all
        line += part
    threading.Thread(target=_end_with_parent, args=(requests,), daemon=True).start()
    seal, _, request = line.partition(b" ")
    return seal, request


def _end_with_parent(requests: int) -> None:
    """End when the parent is gone, even if it was killed: its end of the pipe closes."""
    while os.read(requests, 1 << 16):
        pass
    from mlx_audit.audit.scratch import leave_scratch

    leave_scratch()
    os._exit(1)


if __name__ == "__main__":
    main()
