"""The fixed-capacity form of mlx-lm's `QuantizedKVCache`: keys and values in few bits, with scales and biases."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import mlx.core as mx
from mlx_lm.models.cache import QuantizedKVCache

from mlx_audit.caches.refusals import require_fitting, require_slots
from mlx_audit.caches.slots import SlottedCache
from mlx_audit.errors import ShapeMismatch

_PARTS = 3
"""Packed numbers, scales and biases."""

Packed = tuple[mx.array, ...]


class FixedCapacityQuantizedCache(SlottedCache):
    """Keys and values of `capacity` tokens, quantized as they are written.

    Args:
        keys, values: Packed uint32, scales and biases of each, `[B, heads, capacity, …]`; none where unwritten.
        position: int32 `[1]`, tokens already written.
        capacity: Tokens of the text.
        bits, group_size: mlx-lm's.
    """

    kind = "quantized"
    native = QuantizedKVCache
    rewinds = True

    keys: Packed
    values: Packed

    def __init__(
        self, keys: Packed, values: Packed, position: mx.array, capacity: int, bits: int, group_size: int
    ) -> None:
        if len(keys) != len(values) or len(keys) not in (0, _PARTS):
            raise ShapeMismatch(
                "keys and values don't belong together",
                where="FixedCapacityQuantizedCache",
                found=f"{len(keys)} and {len(values)} arrays",
                allowed="packed numbers, scales and biases of each",
            )
        super().__init__([*keys, *values], position, capacity)
        require_slots(type(self), self.slots, capacity)
        self.bits, self.group_size = bits, group_size

    def _buffers(self) -> list[mx.array]:
        return [*self.keys, *self.values]

    def _set_buffers(self, buffers: Sequence[mx.array]) -> None:
        self.keys, self.values = tuple(buffers[:_PARTS]), tuple(buffers[_PARTS:])

    def keys_and_values(self) -> tuple[Packed, Packed]:
        """Return what attention reads: the buffers up to the rung."""
        read = tuple(
            array if self._rung == self.slots else array[:, :, : self._rung] for array in self._buffers()
        )
        return read[:_PARTS], read[_PARTS:]

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Packed, Packed]:
        """Quantize and write `[B, heads, L, width]` keys and values at `slot`, advance, return what attention reads."""
        packed = [
            part
            for array in (keys, values)
            for part in mx.quantize(array, group_size=self.group_size, bits=self.bits)
        ]
        require_fitting(type(self), packed, self._buffers())
        self._reserve(keys.shape[2])
        now = self._now()
        self._set_buffers(
            [mx.slice_update(b, n, now, axes=(2,)) for b, n in zip(self._buffers(), packed, strict=True)]
        )
        self._advance(keys.shape[2])
        return self.keys_and_values()

    def _slot_of(self, time: mx.array) -> mx.array:
        return time

    @classmethod
    def _slots_for(cls, native: Any, max_tokens: int) -> int:
        return max_tokens if cls._native_buffers(native) else 0

    @classmethod
    def _native_buffers(cls, native: Any) -> list[mx.array]:
        return [] if native.keys is None or native.values is None else [*native.keys, *native.values]

    @classmethod
    def _like(cls, native: Any, buffers: Sequence[mx.array], position: mx.array, capacity: int) -> Self:
        return cls(
            tuple(buffers[:_PARTS]),
            tuple(buffers[_PARTS:]),
            position,
            capacity,
            native.bits,
            native.group_size,
        )

    @classmethod
    def _content(cls, native: Any) -> list[mx.array]:
        return [array[..., : native.offset, :] for array in cls._native_buffers(native)]

    def to_native(self) -> Any:
        self._require_even()
        held = self.count() or 0
        native: Any = QuantizedKVCache(self.group_size, self.bits)
        if held:
            # Lists: mlx-lm's update assigns into them.
            parts = [array[..., :held, :] for array in self._buffers()]
            native.keys, native.values = parts[:_PARTS], parts[_PARTS:]
        native.offset = held
        return native
