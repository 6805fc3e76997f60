"""The kill matrix: each planted fault, in each stack that it applies to, and which checks saw it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from mlx_audit.audit.assembly import DIED
from mlx_audit.audit.planting import HEALTHY
from mlx_audit.audit.request import Panel, Planting, Request
from mlx_audit.audit.runner import Listener, Outcome, run_audits
from mlx_audit.evidence.results import CheckResult, Environment, Result
from mlx_audit.faults import FAULTS, Fault

Fate = Literal["killed", "survived", "no place", "blind"]
"""What became of a fault: seen by its check, not seen, nothing in the model to patch, or a check that fails anyway."""

_SECONDS = 7200.0
"""For one stack and all its faults."""

INTERNAL = "internal error of mlx-audit"
"""How a check's reason begins when the check itself broke: that is no answer."""


@dataclass(frozen=True)
class Stack:
    """Where faults are planted.

    Attributes:
        name: Of the column; empty where each variant of the target is a column of its own.
        request: The target.
        variant: The only variant to plant in.
        faults: Names of those to plant.
        unsound: Checks that are known to fail on the healthy stack, with the reason.
    """

    name: str
    request: Request
    variant: str | None
    faults: tuple[str, ...]
    unsound: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Planted:
    """A fault in a stack.

    Attributes:
        statuses: By check, of all that were run.
        reason: What the named check says.
    """

    fault: Fault
    stack: str
    fate: Fate
    statuses: Mapping[str, str]
    reason: str

    @property
    def killers(self) -> list[str]:
        """Codes of the checks that fail on it."""
        return [code for code, status in self.statuses.items() if status == "fail"]


@dataclass
class KillMatrix:
    """What a run of planted faults found.

    Attributes:
        stacks: Columns, in order.
        planted: One for each fault and stack that it was planted in.
        unhealthy: By stack, the checks that fail although nothing is planted, other than those that are known to.
        failed: Why a stack could not be looked at.
    """

    stacks: list[str] = field(default_factory=list)
    planted: list[Planted] = field(default_factory=list)
    unhealthy: dict[str, list[str]] = field(default_factory=dict)
    failed: list[str] = field(default_factory=list)
    environment: Environment | None = None

    @property
    def survivors(self) -> list[Planted]:
        """Faults that the check which is named for them does not see."""
        return [one for one in self.planted if one.fate == "survived"]

    @property
    def killed(self) -> list[Planted]:
        """Faults that it does see."""
        return [one for one in self.planted if one.fate == "killed"]

    def by_fault(self) -> dict[str, dict[str, Planted]]:
        """Return the rows: by fault, then by stack."""
        rows: dict[str, dict[str, Planted]] = {}
        for one in sorted(self.planted, key=lambda p: (p.fault.plant.__module__, p.fault.by, p.fault.name)):
            rows.setdefault(one.fault.name, {})[one.stack] = one
        return rows

    def as_json(self) -> dict[str, Any]:
        """Return what `--json` writes, without times and paths."""
        rows = [
            {
                "fault": name,
                "about": next(iter(cells.values())).fault.about,
                "by": next(iter(cells.values())).fault.by,
                "planted": [
                    {"topology": p.stack, "fate": p.fate, "reason": p.reason, "checks": dict(p.statuses)}
                    for p in cells.values()
                ],
            }
            for name, cells in self.by_fault().items()
        ]
        return {
            "schema": "mlx-audit/faults/1",
            "environment": self.environment.model_dump() if self.environment is not None else None,
            "topologies": self.stacks,
            "faults": rows,
            "unhealthy": self.unhealthy,
            "failed": self.failed,
        }


def plant_all(
    stacks: Sequence[Stack],
    panel: Panel,
    *,
    once: bool = False,
    jobs: int | None = None,
    listener: Listener | None = None,
) -> KillMatrix:
    """Plant the faults of each stack and return what became of them.

    A fault that ends its process is planted in a process that is not used again; the others go on in a new one.

    Args:
        stacks: Where, and which.
        panel: What is run on each.
        once: Plant each fault in the first variant of a target only.
        jobs: Most processes at a time.
        listener: Told of each event.
    """
    matrix = KillMatrix()
    waiting = [(stack, stack.faults, True) for stack in stacks if stack.faults]
    while waiting:
        requests = [
            _request(stack, Planting(faults=list(names), panel=panel, once=once, healthy=first))
            for stack, names, first in waiting
        ]
        outcomes = run_audits(requests, jobs=jobs, timeout=_SECONDS, listener=listener)
        again = []
        for (stack, names, _), outcome in zip(waiting, outcomes, strict=True):
            rest = _take(matrix, stack, outcome)
            if rest and len(rest) < len(names):
                again.append((stack, tuple(rest), False))
            elif rest:
                matrix.failed.append(f"{stack.name}: the process dies before {rest[0]} is planted")
        waiting = again
    order = {name: index for index, name in enumerate(stack.name for stack in stacks)}
    matrix.stacks.sort(key=lambda name: order.get(name, len(order)))
    return matrix


def _request(stack: Stack, planting: Planting) -> Request:
    planting = planting.model_copy(update={"variant": stack.variant})
    return stack.request.model_copy(update={"planting": planting})


def _take(matrix: KillMatrix, stack: Stack, outcome: Outcome) -> list[str]:
    """Take the results of a process over, and return the faults that it did not come to."""
    matrix.environment = matrix.environment or outcome.environment
    if outcome.failed is not None:
        matrix.failed.append(f"{stack.name or outcome.request.text}: {outcome.failed.message}")
        return []
    rest = []
    for result in outcome.results:
        name = stack.name or f"{result.family} {result.variant}"
        if name not in matrix.stacks:
            matrix.stacks.append(name)
        if result.configuration == HEALTHY:
            matrix.unhealthy |= _unhealthy(name, result, stack.unsound)
        elif all(check.reason == DIED for check in result.checks):
            rest.append(result.configuration)
        else:
            matrix.planted.append(_planted(name, result, matrix.unhealthy.get(name, []), stack.unsound))
    return rest


def _unhealthy(name: str, result: Result, unsound: Mapping[str, str]) -> dict[str, list[str]]:
    """Return the checks that ought to pass and don't, or that pass though they are known to fail."""
    wrong = [
        check.code
        for check in result.checks
        if (check.status in ("fail", "not-run")) != (check.code in unsound)
    ]
    return {name: wrong} if wrong else {}


def _planted(name: str, result: Result, unhealthy: Sequence[str], unsound: Mapping[str, str]) -> Planted:
    fault = FAULTS[result.configuration]
    named = next(check for check in result.checks if check.code == fault.by)
    statuses = {
        check.code: check.status
        for check in result.checks
        if check.code not in unhealthy and check.code not in unsound
    }
    fate: Fate = "survived"
    if fault.by in unhealthy or fault.by in unsound:
        fate = "blind"
    elif all(check.status == "not-applicable" for check in result.checks):
        fate = "no place"
    elif _sees(fault, named):
        fate = "killed"
    return Planted(fault, name, fate, statuses, named.reason)


def _sees(fault: Fault, named: CheckResult) -> bool:
    """Return whether the check that is named for a fault answers as it must."""
    wanted = "not-run" if fault.undecided else "fail"
    return named.status == wanted and not named.reason.startswith(INTERNAL)
