"""What a cache may make of its position."""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from mlx_audit.caches import FixedCapacityKVCache as Cache
from mlx_audit.caches.slots import SlottedCache
from mlx_audit.decode import CompiledDecodeSession as Session
from mlx_audit.faults.base import Patch, fault


@fault("TRC004", needs="linear")
def position_stands_still(patch: Patch) -> None:
    """The position comes out as it went in."""

    def update_and_fetch(self: Cache, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        self.keys = mx.slice_update(self.keys, keys, self._position, axes=(2,))
        self.values = mx.slice_update(self.values, values, self._position, axes=(2,))
        return self.keys_and_values()

    patch.setattr(Cache, "update_and_fetch", update_and_fetch)


def _offset_by(patch: Patch, shift: int) -> None:
    """Hand out another position than the one that the cache writes at."""
    own = SlottedCache.offset.fget  # type: ignore[attr-defined]
    patch.setattr(SlottedCache, "offset", property(lambda self: own(self) + shift))


@fault("STA001", needs="slots rope")
def rope_one_late(patch: Patch) -> None:
    """Keys and queries of compiled steps are rotated by one position too many."""
    _offset_by(patch, 1)


@fault("STA001", needs="slots rope")
def rope_one_early(patch: Patch) -> None:
    """Keys and queries of compiled steps are rotated by one position too few."""
    _offset_by(patch, -1)


@fault("STA001", needs="only_linear rope")
def rope_shifted_from_the_start(patch: Patch) -> None:
    """The prompt too is read on fixed-capacity caches, so that every position is one too many: logits hide it."""
    _offset_by(patch, 1)

    def prefill(self: Session, tokens: Any, lengths: Any = None) -> mx.array:
        self._state = [cache.state for cache in self._step.caches]
        return self.extend(tokens)

    patch.setattr(Session, "prefill", prefill)


@fault("LIF001", needs="linear")
def position_in_place(patch: Patch) -> None:
    """The position is advanced by `+=`, and handed out without a handle of its own."""

    def update_and_fetch(self: Cache, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        self.keys = mx.slice_update(self.keys, keys, self._position, axes=(2,))
        self.values = mx.slice_update(self.values, values, self._position, axes=(2,))
        self._position += keys.shape[2]
        return self.keys_and_values()

    patch.setattr(Cache, "update_and_fetch", update_and_fetch)
    patch.setattr(Cache, "offset", property(lambda self: self._position))
