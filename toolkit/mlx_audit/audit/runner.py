"""The parent of an audit: one child a target, a few at a time; a dead one is a failed check, and the next goes on."""

from __future__ import annotations

import os
import selectors
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from mlx_audit.audit.assembly import WROTE, Assembly, ProtocolFault
from mlx_audit.audit.events import Event, Failed, Reproduced, read_event
from mlx_audit.audit.process import Child, death
from mlx_audit.audit.request import Request
from mlx_audit.evidence.results import Environment, Result

TIMEOUT_SECONDS = 600.0
_ABORT_SECONDS = 2.0
"""Between the signal that makes a hanging child say where it hangs, and the one that it cannot ignore."""

_LOOK_SECONDS = 0.2
"""Between two looks for children that have ended while something that they started holds their pipes open."""

_LONGEST_EVENT = 16 << 20
"""Bytes of one event; a longer line is none."""

Listener = Callable[[Assembly, Event], None]


@dataclass
class Outcome:
    """What came of one target.

    Attributes:
        request: What was asked for.
        results: One for each reported configuration; empty when `failed`.
        environment: Where the child ran, or None when it died too early.
        skipped: Configurations left out, each with the reason.
        failed: Why the target could not be audited at all, or None.
        reproduced: A failure as a script, where that was asked for and there is one.
    """

    request: Request
    results: list[Result]
    environment: Environment | None
    skipped: list[str]
    failed: Failed | None
    reproduced: Reproduced | None = None


def run_audits(
    requests: Sequence[Request],
    *,
    jobs: int | None = None,
    timeout: float = TIMEOUT_SECONDS,
    listener: Listener | None = None,
    ready: Iterable[Child] = (),
) -> list[Outcome]:
    """Audit the targets and return their outcomes in the order given.

    Args:
        requests: One a target.
        jobs: Most children at a time; the number of processors by default.
        timeout: Seconds that one target may take.
        listener: Told of each event as it comes.
        ready: Children that were started already.
    """
    loop = _Loop(requests, jobs or os.cpu_count() or 1, timeout, listener, deque(ready))
    try:
        loop.run()
    finally:
        loop.kill()
    return [_outcome(loop.assemblies[index]) for index in range(len(requests))]


@dataclass
class _Job:
    """A target whose child is running."""

    assembly: Assembly
    child: Child
    deadline: float
    timed_out: bool = False
    faulty: bool = False
    buffer: bytes = b""


class _Loop:
    """Reads what all running children write, in one thread."""

    def __init__(
        self,
        requests: Sequence[Request],
        jobs: int,
        timeout: float,
        listener: Listener | None,
        ready: deque[Child],
    ) -> None:
        self.assemblies = [Assembly(request) for request in requests]
        self._waiting = deque(self.assemblies)
        self._most = jobs
        self._timeout = timeout
        self._listener = listener
        self._ready = ready
        self._jobs: list[_Job] = []
        self._selector = selectors.DefaultSelector()

    def run(self) -> None:
        """Run until every target has ended."""
        while self._waiting or self._jobs:
            while self._waiting and len(self._jobs) < self._most:
                self._start(self._waiting.popleft())
            now = time.monotonic()
            next_deadline = min(job.deadline for job in self._jobs)
            for key, _ in self._selector.select(min(_LOOK_SECONDS, max(0.0, next_deadline - now))):
                job, read = key.data
                if job in self._jobs:
                    read(job)
            for job in list(self._jobs):
                if job.child.is_over:
                    self._finish(job)
                elif time.monotonic() >= job.deadline:
                    self._late(job)

    def kill(self) -> None:
        """End all children, also those that were never asked anything."""
        for job in self._jobs:
            job.child.kill()
        for child in self._ready:
            child.kill()
        self._selector.close()

    def _start(self, assembly: Assembly) -> None:
        child = self._ready.popleft() if self._ready else Child()
        job = _Job(assembly, child, time.monotonic() + self._timeout)
        self._jobs.append(job)
        self._selector.register(child.events, selectors.EVENT_READ, (job, self._read_events))
        self._selector.register(child.errors, selectors.EVENT_READ, (job, self._read_errors))
        child.send(assembly.request.model_dump_json())

    def _read_events(self, job: _Job) -> bool:
        """Take what there is; False when nothing has come. Ends the job at the last event, or a forged one."""
        part = job.child.read()
        if part is None:
            return False
        *lines, rest = part.split(b"\n")
        job.buffer += lines[0] if lines else rest
        if lines:
            lines[0], job.buffer = job.buffer, rest
        for line in lines:
            if not job.assembly.ended:
                self._take(job, line)
            if job.faulty:
                break
        job.faulty = job.faulty or len(job.buffer) > _LONGEST_EVENT
        if not part or job.faulty or job.assembly.ended:
            self._end(job)
        return True

    def _take(self, job: _Job, line: bytes) -> None:
        try:
            event = read_event(job.child.opened(line, ready=job.assembly.ready))
            job.assembly.receive(event)
        except (ValueError, ProtocolFault):
            job.faulty = True
            return
        if self._listener is not None:
            self._listener(job.assembly, event)

    def _finish(self, job: _Job) -> None:
        """Take the last events of a child that has ended."""
        while job in self._jobs:
            if not self._read_events(job):
                self._end(job)

    def _read_errors(self, job: _Job) -> None:
        if not job.child.drain_errors():
            self._selector.unregister(job.child.errors)

    def _late(self, job: _Job) -> None:
        """Ask a child that takes too long where it is; then make it end."""
        if job.timed_out:
            self._end(job)
            return
        job.timed_out = True
        job.deadline = time.monotonic() + _ABORT_SECONDS
        job.child.abort()

    def _end(self, job: _Job) -> None:
        self._jobs.remove(job)
        registered = self._selector.get_map()
        for descriptor in (job.child.events, job.child.errors):
            if descriptor in registered:
                self._selector.unregister(descriptor)
        if job.faulty:
            job.child.kill()
            how = WROTE
        elif job.timed_out:
            job.child.kill()
            how = f"the process was stopped after {self._timeout:g} s (time-out)"
        else:
            how = f"the process {death(job.child.end())}"
        if job.assembly.ended:
            return
        if job.assembly.is_loading and not job.faulty:
            # The model's code did not let itself be imported. A second child reads it without running it.
            self._waiting.appendleft(job.assembly.reading(how, job.child.last_line))
        else:
            job.assembly.died(how, job.child.where, job.child.last_line)


def _outcome(assembly: Assembly) -> Outcome:
    planned = assembly.planned
    return Outcome(
        assembly.request,
        [] if assembly.failed is not None else assembly.results(),
        assembly.environment,
        planned.skipped if planned is not None else [],
        assembly.failed,
        assembly.reproduced,
    )
