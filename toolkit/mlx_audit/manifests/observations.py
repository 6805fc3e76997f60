"""What was seen of one configuration: its arguments, and the caches that its model makes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mlx_audit.errors import MlxAuditError
from mlx_audit.manifests.topology import CacheSpec

FIXED = ("slots", "bits", "group_size", "keep")
"""Parameters that code has as a number."""


@dataclass(frozen=True)
class Observation:
    """What one configuration was seen to give.

    Attributes:
        label: What is told of it: `the configuration`, or what was changed.
        names: The resolved arguments.
        entries: What `make_cache()` returned.
        count: How many layers there are.
        layers: One cache a layer, `none` included; None where only the entries are known.
        before: Entries ahead of those of layers.
        binding: Whether its arguments agree with each other, so that rules must explain it.
    """

    label: str
    names: Mapping[str, object]
    entries: Sequence[CacheSpec]
    count: int
    layers: Sequence[CacheSpec] | None
    before: Sequence[CacheSpec] = ()
    binding: bool = True


class Unexplained(MlxAuditError):
    """No rule explains what was seen."""


def shape(spec: CacheSpec) -> str:
    """Return kind and structure of an entry without the sizes that a configuration sets."""
    fixed = "".join(f"({name}={value})" for name, value in spec.parameters if name in FIXED)
    return spec.kind + fixed + (f"[{', '.join(map(shape, spec.of))}]" if spec.of else "")


def integers(known: Sequence[Mapping[str, object]]) -> list[str]:
    """Return the arguments that are whole numbers everywhere."""
    first = known[0]
    return [
        name
        for name in first
        if name.isidentifier()
        and not name.startswith("_")
        and all(type(names.get(name)) is int for names in known)
    ]
