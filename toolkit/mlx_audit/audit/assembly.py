"""From the events of one child to the results of one target, also when the child dies on the way."""

from __future__ import annotations

import shlex
import time
from typing import Any

from mlx_audit.audit.events import (
    CheckFinished,
    CheckStarted,
    Done,
    Event,
    Failed,
    Planned,
    PlannedCheck,
    PlannedSubject,
    Ready,
    Reproduced,
    SubjectFinished,
    SubjectStarted,
)
from mlx_audit.audit.exit_codes import UNDECIDED
from mlx_audit.audit.request import Request
from mlx_audit.errors import MlxAuditError, storable
from mlx_audit.evidence.codes import DECODE, RESTORE, claim_of, own_checks
from mlx_audit.evidence.digests import file_digest, model_digest, prefix_digest, toolkit_digest
from mlx_audit.evidence.lapse import PREFIX
from mlx_audit.evidence.results import CheckResult, ClaimResult, Environment, Result, VerdictName
from mlx_audit.evidence.verdict import Verdict, decide
from mlx_audit.manifests import load_manifest

WROTE = "the process wrote to the event channel"
"""What is wrong with a child whose events are none, or come in an order that the worker never makes."""


DIED = "the process died"
"""Reason of a check that the process did not come to."""


class ProtocolFault(MlxAuditError):
    """An event that the worker would not have sent: the target's code wrote it, and no event counts any more."""


class Assembly:
    """Takes the events of one target and makes its results.

    Attributes:
        planned: What the child said it would do, or None before it did.
        failed: Why the target cannot be audited at all, or None.
        reproduced: A failure as a script, where that was asked for and there is one.
        ended: Whether the child said that nothing more comes.
    """

    def __init__(self, request: Request) -> None:
        self.request = request
        self.planned: Planned | None = None
        self.failed: Failed | None = None
        self.reproduced: Reproduced | None = None
        self.ended = False
        self._ready = False
        self._found: list[dict[str, CheckResult]] = []
        self._seconds: dict[int, float] = {}
        self._running: CheckStarted | None = None
        self._subject = 0
        self._started = time.monotonic()
        self._death = ""
        self._digests: dict[str, str] = {}

    def receive(self, event: Event) -> None:
        """Take the next event.

        Raises:
            ProtocolFault: the worker cannot have sent it; nothing was taken.
        """
        if not self._is_next(event):
            raise ProtocolFault(WROTE, found=event.kind)
        match event:
            case Ready():
                self._ready = True
            case Planned():
                self.planned = event
                self._found = [{} for _ in event.subjects]
                # Now, while the child works: it takes a while.
                self._digests = self._current_digests()
                if event.adapter:
                    self._digests["adapter"] = event.adapter
                if any(claim_of(c.code) == RESTORE for subject in event.subjects for c in subject.checks):
                    self._digests[PREFIX] = prefix_digest()
            case SubjectStarted():
                self._subject, self._started = event.subject, time.monotonic()
            case CheckStarted():
                self._running = event
            case CheckFinished():
                self._running = None
                self._found[event.subject][event.check.code] = event.check
            case Reproduced():
                self.reproduced = event
            case SubjectFinished():
                self._seconds[event.subject] = event.seconds
            case Failed():
                self.failed, self.ended = event, True
            case Done():
                self.ended = True

    def _is_next(self, event: Event) -> bool:
        """Whether an event can come now: each once, in its place, about what was planned."""
        if self.ended or isinstance(event, Ready) == self._ready:
            return False
        match event:
            case Ready():
                return True
            case Planned():
                return self.planned is None and _is_sound(event)
            case Failed():
                return True
        if self.planned is None:
            return False
        running = self._running
        match event:
            case CheckFinished():
                planned = self._check(event.subject, event.check.code)
                return (
                    running is not None
                    and planned is not None
                    and (event.subject, event.check.code) == (running.subject, running.code)
                    and (event.check.name, event.check.tier) == (planned.name, planned.tier)
                )
            case CheckStarted():
                new = self._check(event.subject, event.code) is not None
                return running is None and new and event.code not in self._found[event.subject]
            case Reproduced():
                known = self._check(event.subject, event.code) is not None
                return running is None and known and self.reproduced is None and self._is_reproducing
            case SubjectStarted() | SubjectFinished():
                return (
                    running is None
                    and 0 <= event.subject < len(self._found)
                    and event.subject not in self._seconds
                )
            case Done():
                subjects = zip(self.planned.subjects, self._found, strict=True)
                return running is None and all(len(s.checks) == len(found) for s, found in subjects)

    def _check(self, subject: int, code: str) -> PlannedCheck | None:
        assert self.planned is not None
        if not 0 <= subject < len(self.planned.subjects):
            return None
        return next((check for check in self.planned.subjects[subject].checks if check.code == code), None)

    @property
    def ready(self) -> bool:
        """Whether the child has done its imports, and so knows the secret of its channel."""
        return self._ready

    @property
    def is_loading(self) -> bool:
        """Whether the model's code is being imported for the first time, to be audited itself."""
        request = self.request
        return self._ready and self.planned is None and not request.unloadable and request.planting is None

    def reading(self, how: str, last_line: str) -> Assembly:
        """Begin anew with a model that could not be loaded: only its source is looked at.

        Args:
            how: How the process ended, such as `the process ended with exit status 0`.
            last_line: The last line that it wrote to stderr.
        """
        reason = f"{how} {self._phase()}" + (f": {last_line}" if last_line else "")
        self.request = self.request.model_copy(update={"unloadable": storable(reason)})
        self._ready = False
        return self

    @property
    def environment(self) -> Environment | None:
        """Where the child ran."""
        return self.planned.environment if self.planned is not None else None

    @property
    def running(self) -> str:
        """The code of the check that is being run; empty between checks."""
        return self._running.code if self._running is not None else ""

    @property
    def current(self) -> str:
        """The configuration being worked on; empty before the plan."""
        return self.planned.subjects[self._subject].configuration if self.planned is not None else ""

    def died(self, how: str, where: str | None, last_line: str) -> None:
        """Note that the process is gone: the running check failed, the rest was not run.

        Args:
            how: Such as `the process died with SIGABRT (signal 6)`.
            where: File:line of the model's code, where it is known.
            last_line: The last line that the process wrote to stderr.
        """
        self.ended = True
        if not self._ready:
            message = f"{how} before it could begin" + (f": {last_line}" if last_line else "")
            self.failed = Failed(message=message, exit_code=UNDECIDED)
            return
        during = f" during {self.running}" if self.running else f" {self._phase()}"
        self._death = how + during + (f": {last_line}" if last_line else "")
        self._seconds.setdefault(self._subject, round(time.monotonic() - self._started, 3))
        if self.planned is None:
            return
        # Between checks the next one takes the blame, so that a death never passes.
        index, code = self._next()
        if code is not None and not self._is_reproducing:
            check = next(c for c in self.planned.subjects[index].checks if c.code == code)
            self._found[index][code] = _result(check, "fail", self._death, where=where)

    def results(self) -> list[Result]:
        """Return one result for each reported subject."""
        if self.planned is None:
            return [self._unplanned(subject) for subject in self._names()] if self._death else []
        self._complete()
        return [
            self._result(index, subject)
            for index, subject in enumerate(self.planned.subjects)
            if subject.reported
        ]

    def _phase(self) -> str:
        return "while the model was loaded" if self.planned is None else "between two checks"

    @property
    def _is_reproducing(self) -> bool:
        """Whether every check has its result, and the child only makes a failure smaller."""
        assert self.planned is not None
        subjects = zip(self.planned.subjects, self._found, strict=True)
        complete = all(len(subject.checks) == len(found) for subject, found in subjects)
        failed = any(check.status == "fail" for found in self._found for check in found.values())
        return self.request.options.repro and complete and failed

    def _next(self) -> tuple[int, str | None]:
        """The running check, else the first without a result, else the last of all."""
        if self._running is not None:
            return self._running.subject, self._running.code
        assert self.planned is not None
        last: tuple[int, str | None] = 0, None
        for index, subject in enumerate(self.planned.subjects):
            for check in subject.checks:
                last = index, check.code
                if check.code not in self._found[index]:
                    return last
        return last

    def _complete(self) -> None:
        """Give every planned check that has no result one that says so."""
        assert self.planned is not None
        for subject, found in zip(self.planned.subjects, self._found, strict=True):
            for check in subject.checks:
                if check.code not in found:
                    found[check.code] = _result(check, "not-run", DIED)

    def _result(self, index: int, subject: PlannedSubject) -> Result:
        checks = [self._reproducible(check, subject) for check in self._checks(index, subject)]
        verdict = decide(checks, limits=subject.limits, partial=self.request.options.partial)
        return self._make(subject, verdict, checks, self._seconds.get(index, 0.0))

    def _make(
        self,
        subject: PlannedSubject,
        verdict: Verdict,
        checks: list[CheckResult],
        seconds: float,
    ) -> Result:
        claims = {DECODE: ClaimResult(claimed=subject.claimed, verdict=verdict.name, reason=verdict.reason)}
        if (restore := self._restore(subject, verdict, checks)) is not None:
            claims[RESTORE] = restore
        return Result(
            target=self.request.text,
            family=self.request.family,
            variant=subject.variant,
            configuration=subject.configuration,
            verdict=verdict.name,
            reason=verdict.reason,
            limits=subject.limits,
            claims=claims,
            checks=checks,
            digests=self._digests,
            seed=self.request.options.seed,
            profile=self.request.options.profile,
            seconds=seconds,
        )

    def _restore(
        self, subject: PlannedSubject, verdict: Verdict, checks: list[CheckResult]
    ) -> ClaimResult | None:
        """Return what was found of restored prefixes, or None where nothing is claimed of them and none was asked."""
        if own_checks(checks, RESTORE):
            verdict = decide(checks, partial=self.request.options.partial, claim=RESTORE)
        elif subject.restore in (None, "undecided"):
            return None
        elif checks:
            verdict = decide([], partial=self.request.options.partial, claim=RESTORE)
        return ClaimResult(claimed=subject.restore, verdict=verdict.name, reason=verdict.reason)

    def _checks(self, index: int, subject: PlannedSubject) -> list[CheckResult]:
        """A subject's own checks, then the numeric ones of the tiny configurations that it rests on."""
        own = [self._found[index][check.code] for check in subject.checks]
        borrowed: dict[str, CheckResult] = {}
        for lender in subject.borrows:
            assert self.planned is not None
            name = self.planned.subjects[lender].configuration
            for check in self._found[lender].values():
                known = borrowed.get(check.code)
                if check.tier == "numeric" and (known is None or known.status == "not-applicable"):
                    borrowed[check.code] = check.model_copy(update={"figures": {"on": name, **check.figures}})
        return own + list(borrowed.values())

    def _reproducible(self, check: CheckResult, subject: PlannedSubject) -> CheckResult:
        if check.status != "fail":
            return check
        return check.model_copy(update={"reproduce": self._command(check.code, subject)})

    def _command(self, code: str, subject: PlannedSubject) -> str:
        request, options = self.request, self.request.options
        words = ["mlx-audit", "run", request.text]
        config = request.config_path
        if subject.published and request.manifest is not None:
            config = load_manifest(request.manifest).configuration_path(subject.configuration)
        words += ["--config", str(config)] if config is not None else []
        words += ["--only", code, "--seed", str(options.seed), "--profile", options.profile]
        words += ["--dtype", options.dtype] if options.dtype != "float32" else []
        return shlex.join(words)

    def _current_digests(self) -> dict[str, str]:
        request = self.request
        if request.file is not None:
            return {"model": file_digest(request.file), "toolkit": toolkit_digest()}
        assert request.module is not None, "a target has a module or a file"
        return {"model": model_digest(request.module), "toolkit": toolkit_digest()}

    def _names(self) -> list[PlannedSubject]:
        """What would have been planned, for a child that died before it could say so."""
        request = self.request
        manifest = load_manifest(request.manifest) if request.manifest is not None else None
        if manifest is None or request.config_name is not None:
            return [PlannedSubject(variant="default", configuration=request.config_name or "given")]
        return [
            PlannedSubject(
                variant=name,
                configuration="tiny",
                claimed=variant.claims.compiled_decode,
                restore=variant.claims.prefix_restore,
            )
            for name, variant in manifest.variants.items()
        ]

    def _unplanned(self, subject: PlannedSubject) -> Result:
        # A reader that dies has refuted nothing; whoever else wrote to the channel meant to deceive.
        name: VerdictName = "undecided" if self.request.unloadable else "not-capable"
        return self._make(subject, Verdict(name, self._death), [], self._seconds.get(0, 0.0))


def _is_sound(plan: Planned) -> bool:
    """Whether each code stands once in a subject, and whatever is borrowed is there."""
    everywhere = range(len(plan.subjects))
    return all(
        len({check.code for check in subject.checks}) == len(subject.checks)
        and all(index in everywhere for index in subject.borrows)
        for subject in plan.subjects
    )


def _result(check: PlannedCheck, status: Any, reason: str, *, where: str | None = None) -> CheckResult:
    return CheckResult(
        code=check.code, name=check.name, tier=check.tier, status=status, reason=reason, where=where
    )
