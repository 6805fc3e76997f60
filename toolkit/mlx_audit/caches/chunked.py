"""The fixed-capacity form of mlx-lm's `ChunkedKVCache`: attention stays inside chunks of fixed size."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import mlx.core as mx
from mlx_lm.models.cache import ChunkedKVCache

from mlx_audit.caches.keyed import pair
from mlx_audit.caches.ring import RingCache
from mlx_audit.errors import HostState, ShapeMismatch


class FixedCapacityChunkedCache(RingCache):
    """The last `chunk` tokens in a ring, of which a token sees those of its own chunk.

    Chunks are counted from the first token of a row: token t belongs to chunk t // `chunk`.

    Args:
        keys, values: `[B, heads, slots, width]`, where slots is the chunk, or the capacity where that is smaller.
        position: int32 `[1]`, tokens already written.
        capacity: Tokens of the text.
        chunk: mlx-lm's `chunk_size`.
    """

    kind = "chunked"
    native = ChunkedKVCache

    def __init__(
        self, keys: mx.array | None, values: mx.array | None, position: mx.array, capacity: int, chunk: int
    ) -> None:
        if chunk < 1:
            raise ShapeMismatch(
                "a chunk holds at least one token", where="FixedCapacityChunkedCache", found=chunk
            )
        super().__init__([] if keys is None or values is None else [keys, values], position, capacity, chunk)
        self.chunk = chunk

    @property
    def chunk_size(self) -> int:
        """Tokens in a chunk, by mlx-lm's name."""
        return self.chunk

    @property
    def start_position(self) -> mx.array:
        """Content position of the oldest token held, int32 `[1]` (mlx-lm's models read it)."""
        return mx.maximum(self.offset - self.slots, 0)

    def maybe_trim_front(self) -> None:
        """Nothing is cut: the ring overwrites what no token sees any more (mlx-lm's models call this)."""

    def _visible(self, queries: mx.array, times: mx.array, window: int | None) -> mx.array:
        mask = super()._visible(queries, times, window) & (times >= 0)
        padding = 0 if self._time is None else mx.expand_dims(self._time - self._position, (1, 2, 3))
        return mask & ((queries - padding) // self.chunk == (times - padding) // self.chunk)

    @classmethod
    def _slots_for(cls, native: Any, max_tokens: int) -> int:
        return min(native.chunk_size, max_tokens) if cls._native_buffers(native) else 0

    @classmethod
    def _like(cls, native: Any, buffers: Sequence[mx.array], position: mx.array, capacity: int) -> Self:
        return cls(*pair(buffers), position, capacity, native.chunk_size)

    @classmethod
    def _content(cls, native: Any) -> list[mx.array]:
        held = native.offset - native.start_position
        if held < min(native.offset, native.chunk_size):
            raise HostState(
                "the chunk does not hold the tokens that it says; it was cut after its front was dropped",
                where="FixedCapacityChunkedCache.adopt",
                found=f"offset {native.offset}, start_position {native.start_position}",
                allowed=f"the last {native.chunk_size} tokens, or all",
                fix="prefill again: ChunkedKVCache.trim is exact only before maybe_trim_front has dropped tokens",
            )
        return [array[..., :held, :] for array in cls._native_buffers(native)]

    def to_native(self) -> ChunkedKVCache:
        self._require_even()
        held = self.count() or 0
        native = ChunkedKVCache(self.chunk)
        if held:
            kept = min(held, self.slots)
            times = mx.arange(held - kept, held)
            slots = self._slot_of(times)
            native.keys, native.values = (mx.take(array, slots, axis=2) for array in self._buffers())
            native.start_position = held - kept
        native.offset = held
        return native
