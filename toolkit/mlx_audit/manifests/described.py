"""What each cache of a topology is: its kind, and its parameters by the arguments that have their values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mlx_audit.manifests.kinds import KINDS
from mlx_audit.manifests.observations import FIXED, Observation, Unexplained, integers, shape
from mlx_audit.manifests.topology import CacheSpec

Rule = dict[str, Any]


def before(seen: Sequence[Observation]) -> list[Rule]:
    known = [item for item in seen if item.layers is not None]
    forms = {tuple(map(shape, item.before)) for item in known}
    if len(forms) > 1:
        raise Unexplained("the entries before those of layers change with the configuration")
    return [_rule([(item.names, item.before[at]) for item in known]) for at in range(len(known[0].before))]


def described(name: str, seen: Sequence[Observation]) -> Rule:
    """Return the rule of a shape without its condition, each parameter named by the argument that has its value."""
    return _rule([(i.names, spec) for i in seen for spec in i.layers or () if shape(spec) == name])


def _rule(instances: Sequence[tuple[Mapping[str, object], CacheSpec]]) -> Rule:
    first = instances[0][1]
    if first.kind not in KINDS:
        raise Unexplained(
            "a cache class of its own, which no kind of a manifest stands for", found=first.kind
        )
    rule: Rule = {"cache": first.kind}
    for at, (name, _) in enumerate(first.parameters):
        rule[name] = _parameter([(names, spec.parameters[at][1]) for names, spec in instances], name)
    if first.of:
        rule["of"] = [
            _rule([(names, spec.of[at]) for names, spec in instances]) for at in range(len(first.of))
        ]
    return rule


def _parameter(instances: Sequence[tuple[Mapping[str, object], int]], name: str) -> str | int:
    """Return the argument that has the parameter's value everywhere; a number where it is always the same."""
    values = {value for _, value in instances}
    if name in FIXED and len(values) == 1:
        return values.pop()
    names = [
        n
        for n in integers([names for names, _ in instances])
        if all(known[n] == value for known, value in instances)
    ]
    if names:
        return min(names, key=lambda text: (name not in text, len(text)))
    if len(values) == 1:
        return values.pop()
    raise Unexplained(f"no argument gives the {name} of a cache", found=sorted(values))
