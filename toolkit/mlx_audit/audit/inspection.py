"""What `inspect` shows of a target: layers, costs and hazards of each configuration, without a verdict."""

from __future__ import annotations

from collections.abc import Sequence

from mlx_audit.audit.inspected import Inspection
from mlx_audit.audit.plan import Entry, Plan, make_plan
from mlx_audit.audit.request import Request
from mlx_audit.checks.subject import Subject
from mlx_audit.errors import MlxAuditError, storable
from mlx_audit.manifests import CacheSpec
from mlx_audit.models.live import live_specs
from mlx_audit.models.target import Target
from mlx_audit.tracing.cost import step_cost

CAPACITIES = (1024, 8192, 32768, 131072)
"""Tokens at which the cost of a step is stated."""


def inspect_request(request: Request) -> list[Inspection]:
    """Return one inspection a variant: of the given configuration, else the first published one, else `tiny`."""
    target, plan = request.target(), make_plan(request)
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
        inspection.hazards = [storable(error)]
        return inspection
    traced = subject.tracer.capacity
    inspection.costs = [step_cost(proof.graph, capacity, traced).figures() for capacity in CAPACITIES]
    inspection.hazards = [storable(difference) for difference in proof.differences]
    return inspection


def _layers(live: Sequence[CacheSpec | str], declared: Sequence[CacheSpec]) -> list[str]:
    """Return a label for each live cache, and `none` for each layer that the manifest says has none."""
    labels = [spec if isinstance(spec, str) else spec.label() for spec in live]
    before = len(labels) - sum(spec.kind != "none" for spec in declared)
    if before < 0 or not declared:
        return labels
    caches = iter(labels[before:])
    return [*labels[:before], *("none" if spec.kind == "none" else next(caches) for spec in declared)]
