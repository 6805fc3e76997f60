"""What a check is: one claim about one subject, with a stable code, and an explanation in its own docstring."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import traceback
from abc import ABC, abstractmethod
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from mlx_audit.checks.subject import Source, Subject
from mlx_audit.errors import MlxAuditError, NotCompileCapable, describe
from mlx_audit.evidence.codes import claim_of
from mlx_audit.evidence.digests import mlx_lm_models
from mlx_audit.evidence.results import CheckResult, Status, Tier
from mlx_audit.tracing import ExportRefused, source_line

if TYPE_CHECKING:
    from mlx_audit.checks.scenario import Scenario

Figures = dict[str, Any]
"""Measured values that a check hands back; keys carry their unit where there is one."""


class CheckFailed(Exception):
    """The claim does not hold.

    Args:
        reason: Got, wanted, and what it means.
        where: File:line, or step, layer and slot.
        figures: What was measured up to here.

    Attributes:
        scenario: What was run, where that can be run again to see what differs first.
    """

    def __init__(self, reason: str, *, where: str | None = None, figures: Figures | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.where = where
        self.figures = figures or {}
        self.scenario: Scenario | None = None


class NotRun(Exception):
    """The claim can be neither confirmed nor refuted here; the message says why, and how to change that."""


class Check(ABC):
    """One claim. A subclass with a `code` is found by itself; its docstring is what `mlx-audit explain` prints.

    The first line of the docstring says what must hold. Sections follow: What it does, Why, Example, How to fix,
    Sources.
    """

    code: ClassVar[str]
    tier: ClassVar[Tier]
    claim: ClassVar[str] = "compiled_decode"
    """What it speaks for; it decides no other claim."""

    requires: ClassVar[tuple[str, ...]] = ()
    """Codes that must have passed (or not apply); otherwise this check is not run, so that one fault shows once.
    Where one that failed speaks for another claim, this check does not apply: no claim decides another."""

    repeated: ClassVar[bool] = True
    """Whether it is run again for each RoPE kind, or decided once, on the variant's main configuration."""

    by_reading: ClassVar[bool] = False
    """Whether the model's source alone decides it: `read` is asked where the model cannot be run."""

    @property
    def name(self) -> str:
        """What must hold, as a short sentence without a full stop."""
        return inspect.cleandoc(type(self).__doc__ or "").splitlines()[0].rstrip(".")

    @property
    def page(self) -> str:
        """The whole explanation."""
        return inspect.cleandoc(type(self).__doc__ or "")

    def not_applicable(self, subject: Subject) -> str | None:
        """Return why the claim says nothing about the subject, or None where it does."""
        return None

    def read(self, source: Source) -> Figures:
        """Check the claim on the source alone, where `by_reading` is set; raises what `run` does."""
        raise NotRun("the source alone does not decide this")

    @abstractmethod
    def run(self, subject: Subject) -> Figures:
        """Check the claim and return what was measured.

        Raises:
            CheckFailed: it does not hold.
            NotRun: it cannot be decided here.
        """


@cache
def all_checks() -> tuple[Check, ...]:
    """Return one instance of every check, in an order in which each comes after those that it requires."""
    package = importlib.import_module("mlx_audit.checks")
    for module in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"{package.__name__}.{module.name}")
    waiting = {cls.code: cls() for cls in _subclasses() if hasattr(cls, "code")}
    ordered: list[Check] = []
    while waiting:
        ready = [c for c in sorted(waiting) if not set(waiting[c].requires) & waiting.keys()]
        if not ready:
            raise RuntimeError(f"checks require each other in a circle: {sorted(waiting)}")
        # One at a time, tier by tier: cheap checks come first.
        code = min(ready, key=lambda c: (_TIER_ORDER[waiting[c].tier], c))
        ordered.append(waiting.pop(code))
    return tuple(ordered)


_TIER_ORDER: Mapping[Tier, int] = {"static": 0, "trace": 1, "numeric": 2, "checkpoint": 3}


def execute_reading(check: Check, source: Source, why_not: str) -> CheckResult:
    """Run one check of a model that cannot be run, and return its result.

    Args:
        check: What to run.
        source: The model's code.
        why_not: Why the model cannot be run: the reason of each check that needs it.
    """
    found: dict[str, Any]
    try:
        if not check.by_reading:
            raise NotRun(why_not)
        found = {"status": "pass", "figures": check.read(source)}
    except NotRun as reason:
        found = {"status": "not-run", "reason": str(reason)}
    except CheckFailed as failure:
        found = {
            "status": "fail",
            "reason": failure.reason,
            "where": failure.where,
            "figures": failure.figures,
        }
    return CheckResult(code=check.code, name=check.name, tier=check.tier, **found)


def execute(
    check: Check, subject: Subject, done: Mapping[str, CheckResult], *, locate: bool = False
) -> CheckResult:
    """Run one check and return its result; no exception of the subject's gets out.

    Args:
        check: What to run.
        subject: What to run it on.
        done: Results so far, by code.
        locate: Whether a failure is followed to where compiled decoding leaves eager decoding first.
    """

    def result(status: Status, reason: str = "", **more: Any) -> CheckResult:
        return CheckResult(
            code=check.code, name=check.name, tier=check.tier, status=status, reason=reason, **more
        )

    for code in check.requires:
        if code in done and done[code].status in ("fail", "not-run"):
            # What another claim lacks decides nothing here: the part that needs it has nothing to speak of.
            status: Status = "not-run" if claim_of(code) == check.claim else "not-applicable"
            return result(status, f"needs {code}, which {_PHRASES[done[code].status]}")
    try:
        once = None if check.repeated or subject.main else "decided on the variant's main configuration"
        why_not = once or check.not_applicable(subject)
        if why_not is not None:
            return result("not-applicable", why_not)
        return result("pass", figures=check.run(subject))
    except CheckFailed as failure:
        if locate and failure.scenario is not None:
            _locate(failure, subject, failure.scenario)
        return result("fail", failure.reason, where=failure.where, figures=failure.figures)
    except NotRun as reason:
        return result("not-run", str(reason))
    except (ExportRefused, NotCompileCapable) as refusal:
        return result("not-run", str(refusal))
    except MlxAuditError as error:
        return result("fail", str(error), where=error.where)
    except Exception as error:
        text = describe(error)
        if any(phrase in text for phrase in _BEHIND_THE_STEP):
            return result("fail", f"{_KEPT_ARRAY}: {text.splitlines()[0]}", where=source_line(error))
        if _in_model(error, subject):
            return result("fail", text, where=source_line(error))
        return result(
            "not-run", f"internal error of mlx-audit, please report it: {text} at {_innermost(error)}"
        )


def _locate(failure: CheckFailed, subject: Subject, scenario: Scenario) -> None:
    """Add to a failure where the two runs part first."""
    from mlx_audit.checks.located import locate  # which imports this module

    location = locate(subject, scenario)
    failure.reason += f"; first divergence: {location.text}"
    failure.where = failure.where or location.place or None
    failure.figures["located"] = {**location.figures(), "scenario": scenario.figures()}


_PHRASES = {"fail": "failed", "not-run": "was not run"}

_BEHIND_THE_STEP = ("eval an array without a primitive", "function with uncaptured inputs")
"""What MLX says of an array that goes from one call to another outside the step's arguments and results."""

_KEPT_ARRAY = "an array of a trace, or an input of it, was kept outside the caches"


def _subclasses() -> list[type[Check]]:
    found: list[type[Check]] = []
    waiting = Check.__subclasses__()
    while waiting:
        found.append(waiting.pop())
        waiting += found[-1].__subclasses__()
    return found


def _innermost(error: BaseException) -> str:
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{Path(frame.filename).name}:{frame.lineno}"


def _in_model(error: BaseException, subject: Subject) -> bool:
    """Return whether the error came out of model code: then it says something about the subject."""
    models = mlx_lm_models().parent
    files = {Path(subject.module.__file__ or ""), *subject.overlay.values()}
    paths = [Path(frame.filename) for frame in traceback.extract_tb(error.__traceback__)]
    return any(path in files or path.is_relative_to(models) for path in paths)
