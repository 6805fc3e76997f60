"""What is certain about a value."""

from __future__ import annotations

from dataclasses import replace

from mlx_audit.source.tags import Tag
from mlx_audit.source.values import (
    NOTHING,
    Cache,
    Constant,
    Dims,
    Mapping,
    Method,
    Module,
    Sequence,
    Thing,
    Value,
)


def truth(value: Value) -> bool | None:
    """Return whether the value is true, None where that depends."""
    if value.open or not value.things:
        return None
    verdicts = {_truth(thing) for thing in value.things}
    return verdicts.pop() if len(verdicts) == 1 else None


def _truth(thing: Thing) -> bool | None:
    if isinstance(thing, Constant):
        return bool(thing.value)
    if isinstance(thing, Sequence):
        return bool(thing.items) if thing.exact else None
    if isinstance(thing, Mapping):
        return bool(thing.items) or (None if thing.rest else False)
    return None if isinstance(thing, Module | Dims | Method) else True


def lasting(value: Value) -> Value:
    """Return a value, marked if it is a container: what is put into it outlives the step."""
    if any(isinstance(thing, Sequence | Mapping) for thing in value.things):
        return replace(value, tags=value.tags | Tag.LASTING)
    return value


def holds_cache(value: Value) -> bool:
    """Return whether a value is a cache, or holds one."""
    return any(
        isinstance(thing, Cache) or (isinstance(thing, Sequence) and any(map(holds_cache, thing.items)))
        for thing in value.things
    )


def is_none(value: Value) -> bool | None:
    """Return whether the value is None, None where that depends."""
    if NOTHING.things <= value.things:
        return None if value.open or len(value.things) > 1 else True
    if not value.open or value.has(Tag.POSITION | Tag.DATA | Tag.KEYS | Tag.MASK):
        return False
    return None
