"""The fixed-capacity form of mlx-lm's `CacheList`: several caches in one entry, nested if need be."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, Self

import mlx.core as mx
from mlx_lm.models.cache import CacheList

from mlx_audit.caches.base import FixedCapacityCache, Role
from mlx_audit.errors import HostState, ShapeMismatch


class FixedCapacityCacheList(FixedCapacityCache):
    """Caches of other kinds side by side, in the order of the native entry; the state is theirs, one after the other.

    Args:
        caches: The parts.
        capacity: Tokens of the text.
    """

    kind = "composite"
    native = CacheList

    def __init__(self, caches: Sequence[FixedCapacityCache], capacity: int) -> None:
        self.caches = tuple(caches)
        self.capacity = capacity
        self.slots = max((cache.slots for cache in caches), default=0)
        self.rows = next((cache.rows for cache in caches if cache.state), 1)
        self.ragged = any(cache.ragged for cache in caches)

    def __getitem__(self, index: int) -> FixedCapacityCache:
        return self.caches[index]

    @property
    def parts(self) -> list[FixedCapacityCache]:
        return [part for cache in self.caches for part in cache.parts]

    @property
    def rewinds(self) -> bool:  # type: ignore[override]
        """Whether `trim(1)` right after a single-token step is always possible."""
        return all(cache.rewinds for cache in self.caches)

    @property
    def extent(self) -> int:
        return max((cache.extent for cache in self.caches), default=0)

    @property
    def state(self) -> list[mx.array]:
        return [array for cache in self.caches for array in cache.state]

    @property
    def roles(self) -> list[Role]:
        return [role for cache in self.caches for role in cache.roles]

    def with_state(self, state: Sequence[mx.array], *, held: int | None = None) -> Self:
        caches, start = [], 0
        for cache in self.caches:
            count = len(cache.state)
            caches.append(cache.with_state(state[start : start + count], held=held))
            start += count
        if start != len(state):
            raise ShapeMismatch(
                "the state has another number of arrays",
                where="FixedCapacityCacheList.state",
                found=len(state),
                allowed=start,
            )
        return self._over(caches)

    def at_rung(self, rung: int) -> Self:
        return self._over([cache.at_rung(rung) for cache in self.caches])

    @classmethod
    def like(cls, native: Any, max_tokens: int) -> Self:
        return cls([_class_for(part).like(part, max_tokens) for part in native.caches], max_tokens)

    @classmethod
    def adopt(cls, native: Any, max_tokens: int) -> Self:
        return cls([_class_for(part).adopt(part, max_tokens) for part in native.caches], max_tokens)

    @classmethod
    def merge(cls, natives: Sequence[Any], max_tokens: int) -> Self:
        columns = zip(*(native.caches for native in natives), strict=True)
        return cls([_class_for(parts[0]).merge(parts, max_tokens) for parts in columns], max_tokens)

    def refilled(self, native: Any) -> Self:
        pairs = zip(self.caches, native.caches, strict=True)
        return self._over([cache.refilled(part) for cache, part in pairs])

    def merged(self, natives: Sequence[Any]) -> Self:
        columns = zip(self.caches, *(native.caches for native in natives), strict=True)
        caches = [cache.merged(parts) for cache, *parts in columns]
        return type(self)(caches, self.capacity)

    def padded(self) -> Self:
        return type(self)([cache.padded() for cache in self.caches], self.capacity)

    def to_native(self) -> CacheList:
        return CacheList(*(cache.to_native() for cache in self.caches))

    def count(self) -> int | None:
        """Return the tokens held; None where no part has a position.

        Raises:
            HostState: the parts stand at different positions.
        """
        counts = {count for cache in self.caches if (count := cache.count()) is not None}
        if len(counts) > 1:
            raise HostState(
                "the parts stand at different positions",
                where="FixedCapacityCacheList",
                found=sorted(counts),
                allowed="one position",
            )
        return next(iter(counts), None)

    def trim(self, n: int) -> int:
        """Forget the last `n` tokens in every part, or in none."""
        caches = [cache.copy() for cache in self.caches]
        if any(cache.trim(n) != n for cache in caches):
            return 0
        self.caches = tuple(caches)
        return n

    def is_trimmable(self) -> bool:
        """Return whether every part can forget any number of tokens."""
        return all(cache.is_trimmable() for cache in self.caches)  # type: ignore[attr-defined]

    def copy(self) -> Self:
        return self._over([cache.copy() for cache in self.caches])

    def empty(self) -> bool:
        """Return whether the first part holds nothing, as mlx-lm asks."""
        return self.caches[0].empty()  # type: ignore[attr-defined, no-any-return]

    def _over(self, caches: Sequence[FixedCapacityCache]) -> Self:
        other = copy.copy(self)
        other.caches = tuple(caches)
        other.rows = next((cache.rows for cache in caches if cache.state), 1)
        return other


def _class_for(native: object) -> type[FixedCapacityCache]:
    from mlx_audit.caches import cache_class, kind_of

    kind = kind_of(native)
    cls = cache_class(kind) if kind is not None else None
    if cls is None:
        raise HostState(
            "a part has no fixed-capacity form",
            where="FixedCapacityCacheList",
            found=f"{type(native).__module__}.{type(native).__qualname__}",
        )
    return cls
