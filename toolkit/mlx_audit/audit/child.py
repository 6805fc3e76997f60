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
    channel, requests = _channels(int(sys.argv[1]))
    os.environ.update(MLX_ENABLE_TF32="0", HF_HUB_OFFLINE="1")  # before MLX is imported
    # Hypothesis would leave a folder of its own in the working directory.
    os.environ.setdefault("HYPOTHESIS_STORAGE_DIRECTORY", str(_cache_folder() / "hypothesis"))
    gc.disable()  # what imports make stays
    from mlx_audit.models.modules import defer_mlx_lm

    defer_mlx_lm()
    from mlx_audit.audit.events import Event, Ready, write_event
    from mlx_audit.audit.request import Request
    from mlx_audit.audit.worker import audit
    from mlx_audit.checks.base import all_checks

    all_checks()
    gc.freeze()
    gc.enable()

    def emit(event: Event) -> None:
        data = write_event(event)
        while data:
            data = data[os.write(channel, data) :]

    emit(Ready())
    audit(Request.model_validate_json(_line(requests)), emit)
    # Not sys.exit: nothing is left to do, and tearing down arrays and threads takes its time.
    os._exit(0)


def _cache_folder() -> Path:
    home = os.environ.get("HOME")
    fallback = Path(home) / ".cache" if home else Path(tempfile.gettempdir())
    return Path(os.environ.get("XDG_CACHE_HOME") or fallback) / "mlx-audit"


def _channels(channel: int) -> tuple[int, int]:
    """Return the descriptors of events and requests, out of reach of what the model prints and reads."""
    os.set_inheritable(channel, False)
    os.dup2(2, 1)
    requests = os.dup(0)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    return channel, requests


def _line(requests: int) -> bytes:
    """Read the request, and from then on watch for the end of the parent."""
    line = b""
    while not line.endswith(b"\n"):
        part = os.read(requests, 1 << 16)
        if not part:
            os._exit(0)  # the parent has no work after all
        line += part
    threading.Thread(target=_end_with_parent, args=(requests,), daemon=True).start()
    return line


def _end_with_parent(requests: int) -> None:
    """End when the parent is gone, even if it was killed: its end of the pipe closes."""
    while os.read(requests, 1 << 16):
        pass
    os._exit(1)


if __name__ == "__main__":
    main()
