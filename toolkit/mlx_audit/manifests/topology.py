"""From a manifest's topology and a model's arguments to the list of its cache entries."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from mlx_audit.errors import MlxAuditError
from mlx_audit.manifests.evaluation import Names, evaluate_condition, evaluate_integer, names_of
from mlx_audit.manifests.syntax import Expression, ExpressionError

if TYPE_CHECKING:
    from mlx_audit.manifests.kinds import Rule
    from mlx_audit.manifests.schema import Topology

MAX_LAYERS = 4096
"""Layers that a topology may count."""

Location = tuple[str | int, ...]


class TopologyError(MlxAuditError):
    """A topology that says nothing usable about these arguments; `location` leads to the place in the manifest."""

    def __init__(self, location: Location, what: str, **details: object):
        super().__init__(what, where=".".join(map(str, location)), **details)  # type: ignore[arg-type]
        self.location = location
        self.column = 1


@dataclass(frozen=True)
class CacheSpec:
    """One cache entry: its kind, and its parameters as numbers.

    `rule` says where it was described: the index in `topology.layers`, or -1, -2, … for the entries of `before`.
    It takes no part in comparison: two entries are equal when they are of one kind with the same parameters.
    """

    kind: str
    parameters: tuple[tuple[str, int], ...] = ()
    of: tuple[CacheSpec, ...] = ()
    rule: int = field(default=0, compare=False)

    def label(self) -> str:
        """A short text such as `rotating(window=8, keep=0)`."""
        inner = [f"{name}={value}" for name, value in self.parameters]
        inner += [part.label() for part in self.of]
        return f"{self.kind}({', '.join(inner)})" if inner else self.kind


def cache_specs(topology: Topology, arguments: object) -> list[CacheSpec]:
    """The entries that `make_cache()` must return, in order: those of `before`, then one a layer that keeps a cache."""
    names = names_of(arguments)
    entries = list(_before(topology, names))
    return entries + [spec for spec in layer_specs(topology, arguments) if spec.kind != "none"]


def layer_specs(topology: Topology, arguments: object) -> list[CacheSpec]:
    """One entry a layer, those of kind `none` included."""
    names = names_of(arguments)
    count = _integer(topology.count, names, ("topology", "count"))
    if count > MAX_LAYERS:
        raise TopologyError(
            ("topology", "count"), "too many layers", found=count, allowed=f"at most {MAX_LAYERS}"
        )
    return [_layer(topology, names | {"i": at}) for at in range(count)]


def _before(topology: Topology, names: Names) -> Iterator[CacheSpec]:
    for at, rule in enumerate(topology.before):
        location = ("topology", "before", at)
        if _holds(rule.when, names, location):
            yield _spec(rule, names, location, -1 - at)


def _layer(topology: Topology, names: Names) -> CacheSpec:
    for at, rule in enumerate(topology.layers):
        location = ("topology", "layers", at)
        if _holds(rule.when, names, location):
            return _spec(rule, names, location, at)
    raise TopologyError(
        ("topology", "layers"),
        f"no rule holds for layer {names['i']}",
        fix="end the list with a rule without `when`",
    )


def _holds(when: Expression | None, names: Names, location: Location) -> bool:
    if when is None:
        return True
    try:
        return evaluate_condition(when, names)
    except ExpressionError as error:
        raise _located(error, (*location, "when"), names) from error


def _spec(rule: Rule, names: Names, location: Location, number: int) -> CacheSpec:
    parameters = tuple(
        (name, _integer(expression, names, (*location, name))) for name, expression in rule.values().items()
    )
    parts = tuple(
        _spec(part, names, (*location, "of", at), number) for at, part in enumerate(getattr(rule, "of", ()))
    )
    return CacheSpec(rule.cache, parameters, parts, number)


def _integer(expression: Expression, names: Names, location: Location) -> int:
    try:
        return evaluate_integer(expression, names)
    except ExpressionError as error:
        raise _located(error, location, names) from error


def _located(error: ExpressionError, location: Location, names: Names) -> TopologyError:
    layer = f", at layer {names['i']}" if "i" in names else ""
    located = TopologyError(
        location, f"{error.what}{layer}", found=error.found, allowed=error.allowed, fix=error.fix
    )
    located.column = error.column
    return located
