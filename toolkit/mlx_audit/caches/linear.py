"""The fixed-capacity form of mlx-lm's plain `KVCache`: slot = position."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import mlx.core as mx
from mlx_lm.models.cache import KVCache

from mlx_audit.caches.base import FixedCapacityCache, Handed, handle, host_int
from mlx_audit.errors import CapacityExceeded, HostState, ShapeMismatch


class FixedCapacityKVCache(FixedCapacityCache):
    """Keys and values of `capacity` tokens, allocated up front, written by index.

    The name and the contract follow mlx-swift-lm's class of the same name (ml-explore/mlx-swift-lm#550).

    Args:
        keys: `[B, heads, capacity, key width]`, finite everywhere: a masked slot is still multiplied by zero.
        values: `[B, heads, capacity, value width]`; the widths may differ.
        position: int32 `[1]`, tokens already written.
    """

    kind = "linear"
    native = KVCache
    rewinds = True

    def __init__(self, keys: mx.array, values: mx.array, position: mx.array) -> None:
        if keys.ndim != 4 or values.ndim != 4 or keys.shape[:3] != values.shape[:3]:
            raise ShapeMismatch(
                "keys and values don't belong together",
                where="FixedCapacityKVCache",
                found=f"keys {keys.shape}, values {values.shape}",
                allowed="[B, heads, capacity, width] each, equal but for the width",
            )
        if position.shape != (1,) or position.dtype != mx.int32:
            raise ShapeMismatch(
                "the position has the wrong form",
                where="FixedCapacityKVCache",
                found=f"{position.dtype} {position.shape}",
                allowed="int32 of shape (1,)",
            )
        self.keys = keys
        self.values = values
        self._position = position
        self.capacity = keys.shape[2]
        # Slots that attention reads, from the first on; the rest holds no token yet.
        self._rung = self.capacity
        # Tokens held, where the host knows; None inside a compiled step, where the session has counted already.
        self._held: int | None = None

    @classmethod
    def like(cls, native: Any, max_tokens: int) -> Self:
        if max_tokens < 1:
            raise CapacityExceeded(
                "a cache holds at least one token",
                where="max_tokens",
                found=max_tokens,
                allowed="1 or more",
            )
        if native.keys is None:
            raise ShapeMismatch(
                "the forward writes nothing into this cache",
                where="FixedCapacityKVCache.like",
                allowed="one written cache for each entry of the model's make_cache()",
                fix="make_cache() should list only caches that the forward uses",
            )
        batch, heads, _, key_width = native.keys.shape
        cache = cls(
            mx.zeros((batch, heads, max_tokens, key_width), native.keys.dtype),
            mx.zeros((batch, heads, max_tokens, native.values.shape[3]), native.values.dtype),
            mx.zeros((1,), mx.int32),
        )
        cache._held = 0
        return cache

    @property
    def state(self) -> list[mx.array]:
        return [self.keys, self.values, self._position]

    @state.setter
    def state(self, state: Sequence[mx.array]) -> None:
        cache = self.with_state(state)
        # Nobody has counted a state that comes from outside (a file, say), so its position is read and checked.
        held = cache.count()
        if not 0 <= held <= self.capacity:
            raise CapacityExceeded(
                "the position lies outside the buffer",
                where="FixedCapacityKVCache.state",
                found=held,
                allowed=f"0 to {self.capacity}",
            )
        self.__dict__.update(cache.__dict__)

    def with_state(self, state: Sequence[mx.array], *, held: int | None = None) -> Self:
        keys, values, position = state
        if keys.shape[2] != self.capacity:
            raise ShapeMismatch(
                "the state belongs to another capacity",
                where="FixedCapacityKVCache.state",
                found=keys.shape[2],
                allowed=self.capacity,
            )
        cache = type(self)(keys, values, position)
        cache._rung, cache._held = self._rung, held
        return cache

    def at_rung(self, rung: int) -> Self:
        cache = self.with_state(self.state, held=self._held)
        cache._rung = min(rung, self.capacity)
        return cache

    @property
    def offset(self) -> mx.array:
        if self.keys.shape[0] == 1:
            return handle(self._position)
        # MLX's RoPE for GPUs takes one offset a row, past the end of this one; with a stride of 0 it takes this one.
        return mx.as_strided(self._position, (1,), (0,))

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """Return what attention reads: the buffers up to the rung."""
        if self._rung == self.capacity:
            return self.keys, self.values
        return self.keys[:, :, : self._rung], self.values[:, :, : self._rung]

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        self._require_fitting(keys, values)
        length = keys.shape[2]
        if self._held is not None:
            if self._held + length > self.capacity:
                raise CapacityExceeded(
                    "the cache is full",
                    where="FixedCapacityKVCache.update_and_fetch",
                    found=f"{self._held} tokens held, {length} more asked for",
                    allowed=f"{self.capacity} in all",
                    fix="make the cache with a larger max_tokens",
                )
            self._held += length
        if self.handed is not None and length == 1:
            return self._hand_out(self.handed, keys, values)
        self.keys = mx.slice_update(self.keys, keys, self._position, axes=(2,))
        self.values = mx.slice_update(self.values, values, self._position, axes=(2,))
        self._position = self._position + length
        return self.keys_and_values()

    def _hand_out(self, handed: Handed, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Write one token and note what is handed out; one kernel on CUDA, where a slice update is two."""
        slot = mx.reshape(self._position, (-1, 1, 1, 1))
        self.keys = mx.put_along_axis(self.keys, mx.broadcast_to(slot, keys.shape), keys, axis=2)
        self.values = mx.put_along_axis(self.values, mx.broadcast_to(slot, values.shape), values, axis=2)
        handed.position, self._position = self._position, self._position + 1
        handed.keys, handed.values = self.keys_and_values()
        return handed.keys, handed.values

    def advance_to(self, position: mx.array) -> None:
        """Take the same position from the kernel that has computed it along the way."""
        self._position = position

    def make_mask(self, N: int, *, window_size: int | None = None, return_array: bool = True) -> mx.array:
        queries = mx.expand_dims(self._position + mx.arange(N), 1)
        slots = mx.arange(self._rung)
        mask = queries >= slots
        if window_size is not None:
            mask = mask & (queries < slots + window_size)
        mask = mx.expand_dims(mask, (0, 1))
        if self.handed is not None and N == 1 and window_size is None:
            self.handed.mask = mask
        return mask

    @classmethod
    def adopt(cls, native: Any, max_tokens: int) -> Self:
        if type(native) is not KVCache:
            raise HostState(
                "only mlx-lm's KVCache can be adopted",
                where="FixedCapacityKVCache.adopt",
                found=f"{type(native).__module__}.{type(native).__qualname__}",
                allowed="mlx_lm.models.cache.KVCache",
            )
        if native.keys is None or native.values is None:
            raise ShapeMismatch(
                "the native cache is empty, so its shapes are unknown",
                where="FixedCapacityKVCache.adopt",
                fix="prefill it first, or ask the adapter for new_fixed_capacity_cache()",
            )
        held = int(native.offset)
        if held > max_tokens:
            raise CapacityExceeded(
                "the native cache holds more tokens than the capacity",
                where="FixedCapacityKVCache.adopt",
                found=held,
                allowed=max_tokens,
                fix=f"use max_tokens of {held} or more",
            )
        cache = cls.like(native, max_tokens)
        start = mx.zeros((1,), mx.int32)
        cache.keys = mx.slice_update(cache.keys, native.keys[..., :held, :], start, axes=(2,))
        cache.values = mx.slice_update(cache.values, native.values[..., :held, :], start, axes=(2,))
        cache._position = mx.array([held], mx.int32)
        cache._held = held
        return cache

    def to_native(self) -> KVCache:
        held = self.count()
        native = KVCache()
        if held:
            native.keys = self.keys[..., :held, :]
            native.values = self.values[..., :held, :]
        native.offset = held
        return native

    def trim(self, n: int) -> int:
        held = self.count()
        if not 0 <= n <= held:
            return 0
        self._position = mx.array([held - n], mx.int32)
        self._held = held - n
        return n

    def copy(self) -> Self:
        cache = super().copy()
        cache._held = self._held
        return cache

    def is_trimmable(self) -> bool:
        """Return True: any number of tokens can be forgotten exactly (mlx-lm's own question to a cache)."""
        return True

    def empty(self) -> bool:
        """Return whether no token is held."""
        return self.count() == 0

    def size(self) -> int:
        """Return the tokens held."""
        return self.count()

    def _require_fitting(self, keys: mx.array, values: mx.array) -> None:
        """Refuse an update that MLX would broadcast into the buffers, or write beside them."""
        for new, buffer in ((keys, self.keys), (values, self.values)):
            length = keys.shape[2] if keys.ndim == 4 else None
            if new.shape != (*buffer.shape[:2], length, buffer.shape[3]):
                raise ShapeMismatch(
                    "the keys or values to write have the wrong shape",
                    where="FixedCapacityKVCache.update_and_fetch",
                    found=f"keys {keys.shape}, values {values.shape}",
                    allowed=f"[{buffer.shape[0]}, {buffer.shape[1]}, L, {self.keys.shape[3]}] and, for values, a "
                    f"width of {self.values.shape[3]}",
                )

    def count(self) -> int:
        if self._held is None:
            self._held = host_int(self._position)
        return self._held
