"""What `inspect` shows of a target: layers, costs and hazards of each configuration, without a verdict."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import groupby
from typing import Any

from mlx_audit.audit.plan import Entry, Plan, make_plan
from mlx_audit.audit.request import Options, Request
from mlx_audit.checks.subject import Subject
from mlx_audit.errors import MlxAuditError
from mlx_audit.manifests import CacheSpec
from mlx_audit.models.live import live_specs
from mlx_audit.models.target import Target
from mlx_audit.tracing.cost import step_cost

CAPACITIES = (1024, 8192, 32768, 131072)
"""Tokens at which the cost of a step is stated."""


@dataclass
class Inspection:
    """One configuration.

    Attributes:
        layers: One label a layer, such as `rotating(window=128, keep=0)`.
        costs: Figures of `tracing.cost.Cost` at each of CAPACITIES.
        hazards: What differs between traces, or why there is no trace.
    """

    family: str
    variant: str
    configuration: str
    rope: str
    claimed: str | None
    layers: list[str]
    costs: list[dict[str, int]] = field(default_factory=list)
    hazards: list[str] = field(default_factory=list)

    def counts(self) -> dict[str, int]:
        """How many layers each label has, in the order of their first layer."""
        return dict(Counter(self.layers))

    def pattern(self) -> str:
        """Runs of equal layers, and how often they repeat: `(5 rotating, 1 linear) × 8`."""
        runs = [(label.partition("(")[0], len(list(group))) for label, group in groupby(self.layers)]
        for period in range(1, len(runs) // 2 + 1):
            if len(runs) % period == 0 and runs == runs[:period] * (len(runs) // period):
                return f"({_runs(runs[:period])}) × {len(runs) // period}"
        return _runs(runs)

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain data."""
        return asdict(self)


def inspect_target(target: Target) -> list[Inspection]:
    """Return one inspection a variant: of the given configuration, else the first published one, else `tiny`."""
    plan = make_plan(Request.of(target, Options(tiers=["static", "trace"])))
    return [_inspect(entry, entry.subject, target) for entry in _chosen(plan) if entry.subject is not None]


def _chosen(plan: Plan) -> list[Entry]:
    chosen: dict[str, Entry] = {}
    for entry in plan.entries:
        known = chosen.get(entry.planned.variant)
        if entry.planned.reported and (
            known is None or (entry.planned.published and not known.planned.published)
        ):
            chosen[entry.planned.variant] = entry
    return list(chosen.values())


def _inspect(entry: Entry, subject: Subject, target: Target) -> Inspection:
    planned, manifest = entry.planned, target.manifest
    declared = manifest.layer_specs(subject.arguments) if manifest is not None else []
    inspection = Inspection(
        family=subject.family,
        variant=planned.variant,
        configuration=planned.configuration,
        rope=subject.rope,
        claimed=planned.claimed,
        layers=_layers(live_specs(subject.lazy_model), declared),
    )
    try:
        proof = subject.proof
    except MlxAuditError as error:
        inspection.hazards = [str(error)]
        return inspection
    traced = subject.tracer.capacity
    inspection.costs = [step_cost(proof.graph, capacity, traced).figures() for capacity in CAPACITIES]
    inspection.hazards = list(proof.differences)
    return inspection


def _layers(live: Sequence[CacheSpec | str], declared: Sequence[CacheSpec]) -> list[str]:
    """Return a label for each live cache, and `none` for each layer that the manifest says has none."""
    labels = [spec if isinstance(spec, str) else spec.label() for spec in live]
    before = len(labels) - sum(spec.kind != "none" for spec in declared)
    if before < 0 or not declared:
        return labels
    caches = iter(labels[before:])
    return [*labels[:before], *("none" if spec.kind == "none" else next(caches) for spec in declared)]


def _runs(runs: list[tuple[str, int]]) -> str:
    return ", ".join(f"{count} {kind}" for kind, count in runs)
