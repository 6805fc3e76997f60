"""The fixed-capacity form of mlx-lm's `RotatingKVCache`: a ring of the last tokens, and the first few kept."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import mlx.core as mx
from mlx_lm.models.cache import RotatingKVCache

from mlx_audit.caches.base import host_int
from mlx_audit.caches.keyed import pair
from mlx_audit.caches.ring import RingCache
from mlx_audit.errors import HostState, ShapeMismatch


class FixedCapacityRotatingCache(RingCache):
    """The last `window` tokens, the first `keep` of the text among them.

    Args:
        keys, values: `[B, heads, slots, width]`, where slots is the window, or the capacity where that is smaller.
        position: int32 `[1]`, tokens already written.
        capacity: Tokens of the text.
        window: mlx-lm's `max_size`.
        keep: mlx-lm's `keep`.
    """

    kind = "rotating"
    native = RotatingKVCache

    def __init__(
        self,
        keys: mx.array | None,
        values: mx.array | None,
        position: mx.array,
        capacity: int,
        window: int,
        keep: int = 0,
    ) -> None:
        if window < 1 or not 0 <= keep < window:
            raise ShapeMismatch(
                "a ring needs room beside what it keeps",
                where="FixedCapacityRotatingCache",
                found=f"window {window}, keep {keep}",
                allowed="window of 1 or more, keep below it",
            )
        super().__init__([] if keys is None or values is None else [keys, values], position, capacity, window)
        self.window, self.keep = window, keep

    def _visible(self, queries: mx.array, times: mx.array, window: int | None) -> mx.array:
        seen = self.window - self.keep if window is None else min(window, self.window - self.keep)
        mask = (queries >= times) & (queries < times + seen)
        if not self.keep:
            return mask
        return mask | ((times >= 0) & (times < self.keep) & (queries >= times))

    def _require_mergeable(self) -> None:
        if self.keep:
            raise ShapeMismatch(
                "rows of different length cannot share a ring that keeps its first tokens",
                where="FixedCapacityRotatingCache.merge",
                found=f"keep {self.keep}",
                allowed="keep 0",
                fix="decode rows of equal length together",
            )

    @classmethod
    def _slots_for(cls, native: Any, max_tokens: int) -> int:
        return min(native.max_size, max_tokens) if cls._native_buffers(native) else 0

    @classmethod
    def _like(cls, native: Any, buffers: Sequence[mx.array], position: mx.array, capacity: int) -> Self:
        return cls(*pair(buffers), position, capacity, native.max_size, native.keep)

    @classmethod
    def _content(cls, native: Any) -> list[mx.array]:
        buffers = cls._native_buffers(native)
        if buffers and not _as_written(native):
            raise HostState(
                "the ring does not hold the tokens that it says; it was cut after it had turned",
                where="FixedCapacityRotatingCache.adopt",
                found=f"offset {native.offset}, write index {native._idx} of {native.keys.shape[2]}",
                allowed="a ring as RotatingKVCache.update_and_fetch leaves it",
                fix="prefill again: RotatingKVCache.trim is exact only before the ring turns",
            )
        return [native._temporal_order(array) for array in buffers]

    def to_native(self) -> RotatingKVCache:
        self._require_even()
        held = self.count() or 0
        native = RotatingKVCache(self.window, self.keep)
        if held:
            native.keys, native.values = (array[..., : min(held, self.slots), :] for array in self._buffers())
            last = host_int(self._slot_of(mx.array([held - 1], mx.int32)))
            native._idx = last + 1
        native.offset = held
        return native


def _as_written(native: Any) -> bool:
    """Return whether an update can have left a ring like this: what `RotatingKVCache.trim` spoils, mostly shows.

    A full ring that was cut by fewer tokens than it had written since its last turn looks like one that was not.
    """
    size, index = native.keys.shape[2], native._idx
    if index == native.offset:
        return bool(index <= size)  # every token is there, in order
    turned = native.offset > native.max_size
    if size == native.max_size:
        return bool(turned and native.keep < index <= size)
    return bool(turned and index == size > native.max_size)
