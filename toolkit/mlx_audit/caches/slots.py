"""What the caches share that keep keys and values in slots written by index: position, capacity, masks, adoption."""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, Self, cast

import mlx.core as mx

from mlx_audit.caches.base import FixedCapacityCache, Role, handle, host_int
from mlx_audit.caches.refusals import (
    require_alike,
    require_integers,
    require_layout,
    require_native,
)
from mlx_audit.errors import CapacityExceeded, HostState, ShapeMismatch

NEVER = -(1 << 30)
"""The time of a slot that holds no token: before every query, and outside every window."""


class SlottedCache(FixedCapacityCache):
    """Buffers `[B, heads, slots, width]`, and the time at which the next token comes.

    *Time* counts from the first slot that any row uses, padding included; it is the same for all rows. The *position*
    of a row's next token is the time less the row's left padding. Without padding both are one array.

    A cache that the forward never writes has no buffers and an empty state.
    """

    def __init__(self, buffers: Sequence[mx.array], position: mx.array, capacity: int) -> None:
        self._set_buffers(buffers)
        self._require_position(position)
        self._position = position
        # Present in ragged batches only; elsewhere the position is the time.
        self._time: mx.array | None = None
        self.capacity = capacity
        self.slots = buffers[0].shape[2] if buffers else 0
        self.rows = buffers[0].shape[0] if buffers else 1
        # Slots that attention reads, from the first on; the rest holds no token yet.
        self._rung = self.slots
        # Tokens held, where the host knows; None inside a compiled step, where the session has counted already.
        self._held: int | None = None

    # What a kind adds: where its buffers are, which slot a token goes to, and what a native cache of it holds.

    @abstractmethod
    def _buffers(self) -> list[mx.array]:
        """Return the buffers, in the order of the state."""

    @abstractmethod
    def _set_buffers(self, buffers: Sequence[mx.array]) -> None:
        """Take other buffers."""

    @classmethod
    @abstractmethod
    def _slots_for(cls, native: Any, max_tokens: int) -> int:
        """Return how many slots hold `max_tokens` tokens."""

    @classmethod
    @abstractmethod
    def _like(cls, native: Any, buffers: Sequence[mx.array], position: mx.array, capacity: int) -> Self:
        """Return a cache with the parameters of `native`."""

    @classmethod
    @abstractmethod
    def _native_buffers(cls, native: Any) -> list[mx.array]:
        """Return the arrays of a native cache, in the order of the state; empty where it was never written."""

    @classmethod
    @abstractmethod
    def _content(cls, native: Any) -> list[mx.array]:
        """Return the tokens of a native cache in the order of their time, the latest last, without spare room."""

    @abstractmethod
    def _slot_of(self, time: mx.array) -> mx.array:
        """Return the slot that a token of that time is written to."""

    # State.

    @property
    def state(self) -> list[mx.array]:
        if not self.slots:
            return []
        return [*self._buffers(), self._position, *([] if self._time is None else [self._time])]

    @state.setter
    def state(self, state: Sequence[mx.array]) -> None:
        cache = self.with_state(state)
        cache.require_sound()
        self.__dict__.update(cache.__dict__)

    @property
    def roles(self) -> list[Role]:
        buffers: list[Role] = ["buffer"] * len(self._buffers())
        positions: list[Role] = ["position"] * (len(self.state) - len(buffers))
        return buffers + positions

    def with_state(self, state: Sequence[mx.array], *, held: int | None = None) -> Self:
        own = self.state
        if len(state) != len(own):
            raise ShapeMismatch(
                "the state has another number of arrays",
                where=f"{type(self).__name__}.state",
                found=len(state),
                allowed=len(own),
            )
        cache = copy.copy(self)
        cache.handed = None
        cache._held = held
        if own:
            count = len(self._buffers())
            require_layout(type(self), state[:count], self._buffers())
            cache._set_buffers(state[:count])
            cache.rows = state[0].shape[0]
            cache._require_position(state[count])
            cache._position = state[count]
            if self.ragged:
                require_integers(type(self), state[count + 1], 1)
                cache._time = state[count + 1]
        return cache

    def at_rung(self, rung: int) -> Self:
        cache = self.with_state(self.state, held=self._held)
        cache._rung = min(rung, self.slots)
        return cache

    @property
    def extent(self) -> int:
        return self._rung

    # Position.

    @property
    def offset(self) -> mx.array:
        """Content position of the next token, int32, `[1]`, or `[B]` in a ragged batch.

        Later updates don't alter a value already taken.
        """
        if self.rows == 1 or self.ragged:
            return handle(self._position)
        # MLX's RoPE for GPUs takes one offset a row, past the end of this one; with a stride of 0 it takes this one.
        return mx.as_strided(self._position, (1,), (0,))

    @property
    def slot(self) -> mx.array:
        """Write index of the next token, int32 `[1]`; differs from `offset` in rings and under padding."""
        return self._slot_of(handle(self._now()))

    def count(self) -> int | None:
        if self.slots and self._held is None:
            self._held = host_int(self._now())
        return self._held if self.slots else None

    def require_sound(self) -> None:
        held = self.count()
        if held is None:
            return
        positions = cast(list[int], self._position.tolist())
        if min(positions) < 0 or not (max(positions) <= held <= self.capacity):
            raise CapacityExceeded(
                "the position lies outside the buffer",
                where=f"{type(self).__name__}.state",
                found=f"position {positions}, time {held}",
                allowed=f"0 to {self.capacity}, and no row ahead of the time",
            )

    def _now(self) -> mx.array:
        return self._position if self._time is None else self._time

    def _advance(self, length: int) -> None:
        self._position = self._position + length
        if self._time is not None:
            self._time = self._time + length

    # Updates and masks.

    def _reserve(self, length: int) -> None:
        """Refuse `length` more tokens where the host knows that they don't fit."""
        if self._held is None:
            return
        if self._held + length > self.capacity:
            raise CapacityExceeded(
                "the cache is full",
                where=f"{type(self).__name__}.update_and_fetch",
                found=f"{self._held} tokens held, {length} more asked for",
                allowed=f"{self.capacity} in all",
                fix="make the cache with a larger max_tokens",
            )
        self._held += length

    def make_mask(
        self, N: int, *, window_size: int | None = None, return_array: bool = True, **_: Any
    ) -> mx.array:
        """Return the boolean mask `[1 or B, 1, N, keys]` of the next `N` tokens; unwritten slots are false.

        `keys` is the number of keys that `update_and_fetch` returns for `N` tokens.
        """
        queries = mx.expand_dims(self._now() + mx.arange(N), 1)
        times = self._key_times(N)
        mask = self._visible(queries, times, window_size)
        mask = mask if mask.ndim == 4 else mx.expand_dims(mask, (0, 1))
        if self._time is None:
            return mask
        return mask & (times >= mx.expand_dims(self._time - self._position, (1, 2, 3)))

    def _key_times(self, N: int) -> mx.array:
        """Return the time `[keys]` of each key that attention reads for the next `N` tokens."""
        return mx.arange(self._rung)

    def _visible(self, queries: mx.array, times: mx.array, window: int | None) -> mx.array:
        """Return which keys `times` `[keys]` the `queries` `[N, 1]` see, padding aside, in rank 2 or 4."""
        mask = queries >= times
        if window is None:
            return mask
        return mask & (queries < times + window)

    # From and to the model's own caches.

    @classmethod
    def like(cls, native: Any, max_tokens: int) -> Self:
        if max_tokens < 1:
            raise CapacityExceeded(
                "a cache holds at least one token",
                where="max_tokens",
                found=max_tokens,
                allowed="1 or more",
            )
        slots = cls._slots_for(native, max_tokens)
        buffers = [
            mx.zeros((*array.shape[:2], slots, array.shape[3]), array.dtype)
            for array in cls._native_buffers(native)
        ]
        cache = cls._like(native, buffers, mx.zeros((1,), mx.int32), max_tokens)
        cache._held = 0
        return cache

    @classmethod
    def adopt(cls, native: Any, max_tokens: int) -> Self:
        held = require_native(cls, native, max_tokens)
        cache = cls.like(native, max_tokens)
        if not cache.slots:
            return cache
        cache._set_buffers([cache._placed(array, held, held) for array in cls._content(native)])
        cache._position = mx.array([held], mx.int32)
        cache._held = held
        return cache

    @classmethod
    def merge(cls, natives: Sequence[Any], max_tokens: int) -> Self:
        held = [require_native(cls, native, max_tokens) for native in natives]
        require_alike(cls, [cls._native_buffers(native) for native in natives])
        longest = max(held)
        empty = cls.like(natives[0], max_tokens)
        if not empty.slots:
            return empty
        rows = [
            [empty._placed(array, own, longest) for array in cls._content(native)]
            for native, own in zip(natives, held, strict=True)
        ]
        empty._set_buffers([mx.concatenate(list(parts)) for parts in zip(*rows, strict=True)])
        empty.rows = len(natives)
        cache = empty.padded()
        cache._position, cache._time = mx.array(held, mx.int32), mx.array([longest], mx.int32)
        cache._held = longest
        return cache

    def padded(self) -> Self:
        self._require_mergeable()
        cache = copy.copy(self)
        if cache.slots:
            cache.ragged, cache._held = True, 0
            cache._position, cache._time = mx.zeros((self.rows,), mx.int32), mx.zeros((1,), mx.int32)
        return cache

    def _require_mergeable(self) -> None:
        """Refuse rows of different length where the kind cannot hold them."""

    def _require_even(self) -> None:
        """Refuse to hand over rows of different length: mlx-lm's cache of this kind takes padding for tokens."""
        if self.ragged:
            raise HostState(
                "rows of different length have no mlx-lm cache of this kind",
                where=f"{type(self).__name__}.to_native",
                found="a ragged batch",
                allowed="rows of equal length",
                fix="hand over rows that were prefilled alone",
            )

    def _placed(self, content: mx.array, held: int, time: int) -> mx.array:
        """Return a buffer with the last tokens of one row, of which `held` were read, as it looks at `time`."""
        count = min(content.shape[2], self.slots)
        latest = content[:, :, content.shape[2] - count :]
        buffer = mx.zeros((*content.shape[:2], self.slots, content.shape[3]), content.dtype)
        return (
            mx.slice_update(buffer, latest, mx.array([time - count], mx.int32), axes=(2,))
            if count
            else buffer
        )

    def copy(self) -> Self:
        cache = super().copy()
        cache._held = self._held
        return cache

    def trim(self, n: int) -> int:
        held = self.count()
        if held is None:
            return max(n, 0)
        if not 0 <= n <= held or not self._can_forget(n):
            return 0
        self._advance(-n)
        self._held = held - n
        return n

    def _can_forget(self, n: int) -> bool:
        """Return whether all that is left after forgetting `n` tokens is still there, in every row."""
        if not self.ragged or not n:
            return True
        return host_int(mx.min(self._position)) >= n

    def is_trimmable(self) -> bool:
        """Return whether any number of tokens can be forgotten exactly (mlx-lm's own question to a cache)."""
        return self._can_forget(self.count() or 0)

    def empty(self) -> bool:
        """Return whether no token is held."""
        return not self.count()

    def size(self) -> int:
        """Return the tokens held."""
        return min(self.count() or 0, self.slots)

    def _require_position(self, position: mx.array) -> None:
        require_integers(type(self), position, self.rows if self.ragged else 1)
