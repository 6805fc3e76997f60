"""A child process from the parent's side; light imports, so that it can be started before anything else is ready."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import signal
import subprocess
import sys
import sysconfig
from pathlib import PurePath

from mlx_audit.audit.scratch import clear_scratch

READY = b"-"
"""Stands where the secret will: nothing of the target has run yet."""

_TAIL = 16 << 10
"""Bytes of the child's stderr that are kept."""

_GRACE_SECONDS = 5.0
_PYTHON = sysconfig.get_path("stdlib")
_FRAME = re.compile(rb'^  File "([^"\n]+)", line (\d+)', re.MULTILINE)


class Child:
    """A started child that waits for a request.

    Args:
        module: What it runs; it is given the number of the descriptor that it answers on.
    """

    def __init__(self, module: str = "mlx_audit.audit.child") -> None:
        self.events, channel = os.pipe()
        os.set_blocking(self.events, False)
        try:
            self._process = subprocess.Popen(
                # -P: files in the working directory must not shadow modules. faulthandler names the line of a crash.
                [sys.executable, "-P", "-X", "faulthandler", "-m", module, str(channel)],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                pass_fds=[channel],
                start_new_session=True,
                env={**os.environ, "MLX_ENABLE_TF32": "0", "HF_HUB_OFFLINE": "1"},
            )
        finally:
            os.close(channel)
        assert self._process.stderr is not None
        self.errors = self._process.stderr.fileno()
        os.set_blocking(self.errors, False)
        self._tail = b""
        self._seal = secrets.token_hex(16).encode()

    def send(self, request: str) -> None:
        """Hand the request over; a child that has died already shows at its events' end.

        It comes with a secret that each answer must begin with: what else writes to the channel does not know it.
        """
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(self._seal + b" " + request.encode() + b"\n")
            self._process.stdin.flush()

    def read(self) -> bytes | None:
        """Return what the child has written since; empty at the end, None when there is nothing yet."""
        try:
            return os.read(self.events, 1 << 16)
        except BlockingIOError:
            return None

    def opened(self, line: bytes, *, ready: bool = True) -> bytes:
        """Return an answer without its seal; ValueError when it has none. Before `ready` there is no secret."""
        seal, _, answer = line.partition(b" ")
        if seal != (self._seal if ready else READY):
            raise ValueError("an answer without the seal")
        return answer

    @property
    def is_over(self) -> bool:
        """Whether the process has ended; what it started may live on, and hold its pipes open."""
        return self._process.poll() is not None

    @property
    def errors_tail(self) -> str:
        """The last of what the child wrote to stderr."""
        return self._tail.decode(errors="replace")

    def drain_errors(self) -> bool:
        """Keep the last of what the child wrote to stderr; False when there will be no more."""
        try:
            while part := os.read(self.errors, 1 << 16):
                self._tail = (self._tail + part)[-_TAIL:]
        except BlockingIOError:
            return True
        return False

    def end(self) -> int:
        """Return the exit status after the events' end; negative for a signal. Kills what is left."""
        try:
            status = self._process.wait(_GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            self._signal(signal.SIGKILL)
            status = self._process.wait()
        self.kill()
        return status

    def kill(self) -> None:
        """Kill the child and all that it started, and free the pipes. Harmless when it has ended."""
        self._signal(signal.SIGKILL)
        self._process.wait()
        if self.events < 0:
            return
        clear_scratch(self._process.pid)
        self.drain_errors()
        os.close(self.events)
        self.events = -1
        for stream in (self._process.stdin, self._process.stderr):
            if stream is not None and not stream.closed:
                with contextlib.suppress(BrokenPipeError):
                    stream.close()

    def abort(self) -> None:
        """Make a hanging child write where it hangs, and die."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGABRT)

    @property
    def last_line(self) -> str:
        """The last line of stderr that says something; empty when there is none."""
        head = self._tail.split(b"Fatal Python error")[0]
        lines = [line.strip() for line in head.decode(errors="replace").splitlines()]
        return next((line for line in reversed(lines) if line), "")

    @property
    def where(self) -> str | None:
        """`file:line` of the model's code that ran when the child crashed, from faulthandler's report."""
        _, found, report = self._tail.rpartition(b"Fatal Python error")
        if not found:
            return None
        current = report.rpartition(b"Current thread")[2].partition(b"\nThread")[0]
        for path, line in _FRAME.findall(current):
            if name := _model_file(path.decode(errors="replace")):
                return f"{name}:{line.decode()}"
        return None

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, number)


def _model_file(path: str) -> str | None:
    """Return a short name of a file that is model code; None for libraries, Python's own files, and ours."""
    parts = PurePath(path).parts
    if "mlx_lm" in parts:
        return "/".join(parts[parts.index("mlx_lm") :])
    foreign = "site-packages" in parts or "mlx_audit" in parts or path.startswith(("<", _PYTHON))
    return None if foreign else PurePath(path).name


def death(status: int) -> str:
    """Return how a process died: `died with SIGABRT (signal 6)` or `ended with exit status 1`."""
    if status >= 0:
        return f"ended with exit status {status}"
    try:
        name = signal.Signals(-status).name
    except ValueError:
        name = "a signal"
    return f"died with {name} (signal {-status})"
