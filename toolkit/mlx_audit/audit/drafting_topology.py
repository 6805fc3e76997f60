"""The rules of a topology, found by varying a tiny configuration and looking at the caches each time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from types import ModuleType
from typing import Any

from mlx_audit.audit.drafting_variations import variations
from mlx_audit.errors import MlxAuditError
from mlx_audit.manifests import CacheSpec, ExpressionError
from mlx_audit.manifests.evaluation import names_of
from mlx_audit.manifests.observations import Observation, Unexplained, shape
from mlx_audit.manifests.rules import Rules, generalise, written_out
from mlx_audit.manifests.schema import Topology
from mlx_audit.manifests.topology import TopologyError, cache_specs
from mlx_audit.models.build import build_lazy, resolve_arguments
from mlx_audit.models.fitting import Fitted
from mlx_audit.models.observed import Observed, argument_objects, observe
from mlx_audit.models.tiny import layer_count

_MOST = 120
"""Variations that are looked at."""


@dataclass(frozen=True)
class Found:
    """A topology, and the path to the arguments that it speaks of."""

    arguments: str
    rules: Rules

    @property
    def looks_inside(self) -> bool:
        """Whether a rule speaks of a mapping among the arguments, as `text_config['layer_types']` does."""
        return "['" in f"{self.rules.count} {self.rules.layers}"


@dataclass(frozen=True)
class _Seen:
    """What one configuration shows, and every object that can be its arguments."""

    label: str
    observed: Observed
    arguments: Mapping[str, Any]
    binding: bool = True

    def at(self, path: str) -> Observation:
        """Return it as seen from the arguments at a path."""
        seen = self.observed
        names = names_of(self.arguments[path])
        return Observation(
            self.label, names, seen.entries, seen.count, seen.layers, seen.before, self.binding
        )


def find_topology(module: ModuleType, config: Mapping[str, Any], real: Observed, tiny: Fitted) -> Found:
    """Return rules that hold for the real configuration, the tiny one, and all that were tried near it.

    Raises:
        Unexplained: not even a list of layers says what there is.
    """
    given = argument_objects(real.model, resolve_arguments(module, config))
    small = argument_objects(tiny.observed.model, tiny.arguments)
    two = [
        _Seen("the configuration", real, given),
        _Seen("the tiny configuration", tiny.observed, small),
    ]
    near = list(_near(module, tiny, small, {shape(spec) for spec in real.entries}))
    paths = [path for path in small if path in given]
    failure: MlxAuditError | None = None
    for search in (_general, _written):
        found: list[Found] = []
        for path in paths:
            seen = [item.at(path) for item in (*two, *near) if path in item.arguments]
            try:
                found.append(Found(path, search(seen)))
            except (Unexplained, ExpressionError, TopologyError) as error:
                failure = failure or error
        if found:  # arguments that say it themselves go before those that only hold another configuration
            return min(found, key=lambda item: item.looks_inside)
    assert failure is not None, "a model has arguments"
    raise failure


def _general(seen: list[Observation]) -> Rules:
    rules = generalise(seen)
    _require(rules, [item for item in seen if item.binding])
    return rules


def _written(seen: list[Observation]) -> Rules:
    """Return the layers as they are in the two configurations that the draft is about, with a remark on the rest."""
    two, near = seen[:2], [item for item in seen[2:] if item.binding]
    if any(item.layers is None for item in two):
        raise Unexplained("nobody knows which layer keeps which entry")
    # A configuration that is tiny already is both.
    rules = written_out(two if two[0].count != two[1].count else two[:1])
    _require(rules, two)
    fails = [item.label for item in near if not _holds(rules, item)]
    rules.notes["layers"] = (
        "no rule was found that explains which layers keep which cache; this is what the configuration and tiny have,"
        f" and it is wrong for others, such as {'; '.join(fails[:3]) or 'those with other layers'}"
    )
    return rules


def _holds(rules: Rules, item: Observation) -> bool:
    try:
        _require(rules, [item])
    except (Unexplained, ExpressionError, TopologyError):
        return False
    return True


def _near(module: ModuleType, tiny: Fitted, objects: Mapping[str, Any], shapes: set[str]) -> Iterator[_Seen]:
    """Yield what the variations show; those that cannot be built or run, or have other caches, show nothing."""
    count = layer_count(tiny.config) or tiny.observed.count
    for variation in islice(variations(tiny.config, objects.values(), count), _MOST):
        try:
            arguments = resolve_arguments(module, variation.config)
            model = build_lazy(module, arguments)
            seen = observe(model)
        except Exception:
            continue
        if seen.layers is not None and {shape(spec) for spec in seen.entries} <= shapes:
            yield _Seen(variation.label, seen, argument_objects(model, arguments), variation.binding)


def _require(rules: Rules, seen: list[Observation]) -> None:
    """Compare what the rules give with what there was, entry by entry, as the audit will."""
    topology = Topology.model_validate({"count": rules.count, "before": rules.before, "layers": rules.layers})
    for item in seen:
        declared: list[CacheSpec] = cache_specs(topology, item.names)
        if declared != list(item.entries):
            raise Unexplained("the rules that were found do not hold everywhere", found=item.label)
