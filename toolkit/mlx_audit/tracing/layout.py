"""The state of a step, leaf by leaf, and sizes at which to trace it."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from itertools import count
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from mlx_audit.caches import FixedCapacityCache, FixedCapacityCacheList
from mlx_audit.models.live import flat_specs
from mlx_audit.tracing.graph import Leaf

_RING = {"rotating": "window", "chunked": "chunk"}


def largest_ring(model: nn.Module) -> int:
    """Return the largest window or chunk of the model's own caches, in tokens; 0 where none forgets."""
    rings = [spec for spec in flat_specs(model) if spec.kind in ("rotating", "chunked")]
    return max((dict(spec.parameters)[_RING[spec.kind]] for spec in rings), default=0)


def prime_from(start: int, taken: Collection[int] = ()) -> int:
    """Return the first prime from `start` on that is not `taken`."""
    return next(n for n in count(start) if n not in taken and all(n % d for d in range(2, int(n**0.5) + 1)))


def axes_of(model: nn.Module) -> set[int]:
    """Return what capacity and rung must not be: sizes of the weights, and one less, since sinks add a key."""
    parameters: list[tuple[str, mx.array]] = tree_flatten(model.parameters())  # type: ignore[assignment]
    sizes = {size for _, array in parameters for size in array.shape}
    return sizes | {size - 1 for size in sizes}


def leaves_of(cache: FixedCapacityCache, path: str) -> Iterator[Leaf]:
    """Yield a leaf for each state array of a cache, named by its attribute where there is one."""
    if isinstance(cache, FixedCapacityCacheList):
        for index, part in enumerate(cache.caches):
            yield from leaves_of(part, f"{path}[{index}]")
        return
    known = {
        id(array): name.lstrip("_") + (f"[{index}]" if held is not value else "")
        for name, value in vars(cache).items()
        for index, held in ([(0, value)] if isinstance(value, mx.array) else _items(value))
        for array in ([held] if isinstance(held, mx.array) else [])
    }
    for index, (array, role) in enumerate(zip(cache.state, cache.roles, strict=True)):
        name = known.get(id(array), str(index))
        yield Leaf(f"{path}.{name}", role, cache.kind, cache.slots, cache.extent, cache.capacity)


def _items(value: Any) -> list[tuple[int, Any]]:
    return list(enumerate(value)) if isinstance(value, list | tuple) else []
