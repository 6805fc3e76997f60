"""What `inspect` shows of a target: layers, costs and hazards of each configuration, without a verdict."""

from __future__ import annotations

from collections.abc import Sequence

from mlx_audit.audit.inspected import Inspection
from mlx_audit.audit.plan import Entry, Plan, make_plan
from mlx_audit.audit.request import Request
from mlx_audit.checks.base import CheckFailed
from mlx_audit.checks.subject import Subject
from mlx_audit.checks.trace import EveryAttentionMasked
from mlx_audit.errors import MlxAuditError, TargetError, storable
from mlx_audit.manifests import CacheSpec
from mlx_audit.models.build import declared_arguments
from mlx_audit.models.live import leaves, live_specs
from mlx_audit.models.target import Target
from mlx_audit.tracing.cost import step_cost

CAPACITIES = (1024, 8192, 32768, 131072)
"""Tokens at which the cost of a step is stated."""


def inspect_request(request: Request) -> list[Inspection]:
    """Return one inspection a variant: of the given configuration, else the first published one, else `tiny`.

    Raises:
        TargetError: the model cannot be run here.
    """
    target, plan = request.target(), make_plan(request)
    for entry in plan.entries:
        if entry.blocked:
            raise TargetError(entry.blocked)
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
    declared: list[CacheSpec] = []
    if manifest is not None:
        arguments = declared_arguments(subject.module, subject.config, manifest.arguments)
        declared = manifest.layer_specs(arguments)
    inspection = Inspection(
        family=subject.family,
        variant=planned.variant,
        configuration=planned.configuration,
        rope=subject.rope,
        claimed=planned.claimed,
        layers=[],
    )
    _add_layers(inspection, subject, declared)
    try:
        proof = subject.proof
    except MlxAuditError as error:
        inspection.hazards = [storable(error)]
        return inspection
    inspection.costs = [step_cost(proof.graph, capacity).figures() for capacity in CAPACITIES]
    inspection.hazards = [storable(difference) for difference in proof.differences]
    _add_masks(inspection, subject)
    return inspection


def _add_masks(inspection: Inspection, subject: Subject) -> None:
    """State what masks each kind of attention in the traced step; an attention without a mask is a hazard."""
    check = EveryAttentionMasked()
    if check.not_applicable(subject) is not None:
        return
    try:
        figures = check.run(subject)
    except CheckFailed as failure:
        figures = failure.figures
        inspection.hazards.append(storable(failure.reason))
    inspection.masks = figures.get("masks", {})


def _add_layers(inspection: Inspection, subject: Subject, declared: Sequence[CacheSpec]) -> None:
    """Tell layers from entries that belong to none, as far as the manifest says so."""
    live = live_specs(subject.lazy_model)
    before = sum(spec.rule < 0 for spec in subject.expected or ())
    layers = _with_empty(live[before:], declared)
    if layers is None:
        before, layers = 0, live
        count = len(getattr(subject.lazy_model, "layers", live))
        if count != len(live):
            inspection.notes.append(f"{len(live)} caches for {count} layers; no manifest says which is whose")
    inspection.before = [spec.label() for spec in live[:before]]
    inspection.layers = [spec.label() for spec in layers]
    inspection.sees = {spec.label(): _sees(spec) for spec in (*layers, *live[:before])}


def _with_empty(live: Sequence[CacheSpec], declared: Sequence[CacheSpec]) -> list[CacheSpec] | None:
    """Return the live cache of each layer, `none` where the manifest declares none; None where that does not fit."""
    if len(live) != sum(spec.kind != "none" for spec in declared):
        return None
    caches = iter(live)
    return [spec if spec.kind == "none" else next(caches) for spec in declared]


def _sees(spec: CacheSpec) -> str:
    """Return which earlier tokens a token sees through a cache; the model's own mask may hide more."""
    if spec.of:
        return "; ".join(dict.fromkeys(_sees(part) for part in leaves(spec)))
    size = dict(spec.parameters)
    if spec.kind == "rotating" and size["keep"]:
        return f"the first {size['keep']}, and the last {size['window'] - size['keep']}, itself one of them"
    texts = {
        "linear": "all before it",
        "quantized": f"all before it, in {size.get('bits')} bits",
        "rotating": f"the last {size.get('window')}, itself one of them",
        "chunked": f"those before it in its chunk of {size.get('chunk')}",
        "arrays": "none, only a state",
        "none": "no cache of its own",
    }
    return texts.get(spec.kind, "not known")
