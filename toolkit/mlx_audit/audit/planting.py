"""The plan of a process that plants faults: for each stack a healthy subject, and one for each fault."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from mlx_audit.audit.events import PlannedCheck, PlannedSubject
from mlx_audit.audit.planted import PLANT, planted_name
from mlx_audit.audit.request import Panel, Planting
from mlx_audit.checks.base import Check, all_checks
from mlx_audit.checks.parts import specs_of
from mlx_audit.checks.subject import Subject
from mlx_audit.errors import MlxAuditError
from mlx_audit.evidence.codes import claim_of
from mlx_audit.faults import FAULTS, Fault
from mlx_audit.manifests.suggestions import did_you_mean
from mlx_audit.models.live import live_specs

HEALTHY = "healthy"
"""Name of the subject without a fault: a check that fails on it proves nothing by failing elsewhere."""

_CORE = (
    *("TOP001", "TRC001", "TRC002", "TRC003", "TRC004", "TRC005"),
    *("PAR001", "PAR003", "STA001", "STA003", "MSK001", "CAP001", "LIF001"),
    *("RST001", "RST002"),
)
"""Checks that are quick and see most: those of its claim are run for a fault, beside the one that is named."""


def traits_of(subject: Subject) -> frozenset[str]:
    """Return what a stack has, in the words of `Topology.traits`."""
    specs = specs_of(subject)
    kinds = {spec.kind for spec in specs}
    entries = live_specs(subject.model)
    traits = set(kinds) | ({"composite"} if any(entry.of for entry in entries) else set())
    rings = {spec for spec in specs if spec.ring is not None}
    found = {
        "slots": bool(kinds - {"arrays"}),
        "ring": bool(rings),
        "keep": any(spec.keep for spec in rings),
        "only_linear": kinds == {"linear"} and not any(entry.of for entry in entries),
        "only_rings": len(rings) == len(set(specs)),
        "trims": kinds <= {"linear", "quantized"} and not any(entry.of for entry in entries),
        "ragged": not any(spec.keep for spec in rings),
        "alike": len(entries) > 1 and entries[0] == entries[1],
        "rope": any("rope" in path.lower() for path, _ in subject.lazy_model.named_modules()),
        "manifest": subject.expected is not None,
    }
    return frozenset(traits | {trait for trait, holds in found.items() if holds})


def subjects(
    bases: Sequence[Subject], planting: Planting
) -> Iterator[tuple[PlannedSubject, Subject, list[Check], Fault | None]]:
    """Yield, for each stack, the healthy subject and then one for each fault that applies, with its checks."""
    seen: set[str] = set()
    for base in bases:
        if planting.variant not in (None, base.variant):
            continue
        traits = traits_of(base)
        chosen = [FAULTS[name] for name in planting.faults if FAULTS[name].applies(traits)]
        chosen = [fault for fault in chosen if not (planting.once and fault.name in seen)]
        seen |= {fault.name for fault in chosen}
        panels = {fault.name: _panel(fault, planting.panel) for fault in chosen}
        wanted = {check.code for panel in panels.values() for check in panel}
        everything = [check for check in all_checks() if check.code in wanted]
        if planting.healthy:
            yield _planned(base, HEALTHY, everything), replace(base), everything, None
        for fault in chosen:
            yield _planned(base, fault.name, panels[fault.name]), replace(base), panels[fault.name], fault


def _planned(base: Subject, name: str, checks: Sequence[Check]) -> PlannedSubject:
    planned = [PlannedCheck(code=c.code, name=c.name, tier=c.tier) for c in checks]
    return PlannedSubject(variant=base.variant, configuration=name, checks=planned)


def _panel(fault: Fault, panel: Panel) -> list[Check]:
    """Return the checks to run on a fault, the named one first: what it does to others may end the process.

    Checks of other claims are left out: what breaks a restore breaks nothing that they look at.
    """
    found = [c for c in all_checks() if c.tier != "checkpoint" and c.claim == claim_of(fault.by)]
    named = [check for check in found if check.code == fault.by]
    others = [c for c in found if c.code != fault.by and (panel == "all" or c.code in _CORE)]
    return named if panel == "named" else [*named, *others]


def planted_by_environment() -> Fault | None:
    """Return the fault that the environment asks for in every audit, or None.

    Raises:
        MlxAuditError: there is no such fault.
    """
    name = planted_name()
    if name is None:
        return None
    if name not in FAULTS:
        raise MlxAuditError(
            "there is no such fault", where=PLANT, found=name, fix=did_you_mean(name, list(FAULTS))
        )
    return FAULTS[name]
