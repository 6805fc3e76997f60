"""The fixed-capacity form of mlx-lm's plain `KVCache`: slot = time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import mlx.core as mx
from mlx_lm.models.cache import KVCache

from mlx_audit.caches.base import Handed
from mlx_audit.caches.keyed import KeyedCache, pair
from mlx_audit.caches.refusals import require_fitting, require_slots
from mlx_audit.errors import ShapeMismatch


class FixedCapacityKVCache(KeyedCache):
    """Keys and values of `capacity` tokens, allocated up front, written by index.

    The name and the contract follow mlx-swift-lm's class of the same name (ml-explore/mlx-swift-lm#550).

    Args:
        keys: `[B, heads, capacity, key width]`, finite everywhere: a masked slot is still multiplied by zero.
        values: `[B, heads, capacity, value width]`; the widths may differ.
        position: int32 `[1]`, tokens already written.
        capacity: By default, the slots of `keys`.
    """

    kind = "linear"
    native = KVCache
    rewinds = True

    def __init__(
        self,
        keys: mx.array | None,
        values: mx.array | None,
        position: mx.array,
        capacity: int | None = None,
    ) -> None:
        buffers = [] if keys is None or values is None else [keys, values]
        if any(array.ndim != 4 or array.shape[:3] != buffers[0].shape[:3] for array in buffers):
            raise ShapeMismatch(
                "keys and values don't belong together",
                where="FixedCapacityKVCache",
                found=" and ".join(str(array.shape) for array in buffers),
                allowed="[B, heads, capacity, width] each, equal but for the width",
            )
        super().__init__(buffers, position, capacity or buffers[0].shape[2])
        require_slots(type(self), self.slots, self.capacity)

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """Return what attention reads: the buffers up to the rung."""
        return self._up_to_rung()

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Write `[B, heads, L, width]` keys and values at `slot`, advance, and return what attention reads."""
        length = keys.shape[2]
        require_fitting(type(self), [keys, values], self._buffers())
        self._reserve(length)
        if self.handed is not None and length == 1 and self._time is None:
            return self._hand_out(self.handed, keys, values)
        now = self._now()
        old_keys, old_values = self._written_buffers()
        self.keys = mx.slice_update(old_keys, keys, now, axes=(2,))
        self.values = mx.slice_update(old_values, values, now, axes=(2,))
        self._advance(length)
        return self.keys_and_values()

    def _hand_out(self, handed: Handed, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Write one token and note what is handed out; one kernel on CUDA, where a slice update is two."""
        slot = mx.reshape(self._position, (-1, 1, 1, 1))
        old_keys, old_values = self._written_buffers()
        self.keys = mx.put_along_axis(old_keys, mx.broadcast_to(slot, keys.shape), keys, axis=2)
        self.values = mx.put_along_axis(old_values, mx.broadcast_to(slot, values.shape), values, axis=2)
        handed.position, self._position = self._position, self._position + 1
        handed.keys, handed.values = self.keys_and_values()
        return handed.keys, handed.values

    def advance_to(self, position: mx.array) -> None:
        """Take the same position from the kernel that has computed it along the way."""
        self._position = position

    def make_mask(
        self, N: int, *, window_size: int | None = None, return_array: bool = True, **_: Any
    ) -> mx.array:
        mask = super().make_mask(N, window_size=window_size)
        if self.handed is not None and N == 1 and window_size is None and self._time is None:
            self.handed.mask = mask
        return mask

    def _slot_of(self, time: mx.array) -> mx.array:
        return time

    @classmethod
    def _slots_for(cls, native: Any, max_tokens: int) -> int:
        return max_tokens if cls._native_buffers(native) else 0

    @classmethod
    def _like(cls, _: Any, buffers: Sequence[mx.array], position: mx.array, capacity: int) -> Self:
        return cls(*pair(buffers), position, capacity)

    @classmethod
    def _content(cls, native: Any) -> list[mx.array]:
        return [array[..., : native.offset, :] for array in cls._native_buffers(native)]

    def to_native(self) -> KVCache:
        self._require_even()
        held = self.count() or 0
        native = KVCache()
        if held:
            native.keys, native.values = (array[..., :held, :] for array in self._buffers())
        native.offset = held
        return native
