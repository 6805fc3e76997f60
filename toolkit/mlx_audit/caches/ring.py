"""Slots that are written in turn; what the caches share that forget old tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

import mlx.core as mx

from mlx_audit.caches.keyed import KeyedCache
from mlx_audit.caches.refusals import require_fitting, require_slots
from mlx_audit.caches.slots import NEVER


class RingCache(KeyedCache):
    """Slots that are written in turn: a token of time t stays until one of time t + `ring` comes.

    The first `keep` slots are written once. A ring that holds the whole capacity never turns.
    """

    keep: int = 0

    def __init__(self, buffers: Sequence[mx.array], position: mx.array, capacity: int, span: int) -> None:
        super().__init__(buffers, position, capacity)
        require_slots(type(self), self.slots, min(span, capacity))
        # What the last update handed out, for layers that share this cache.
        self._fetched: tuple[mx.array, mx.array] | None = None

    def with_state(self, state: Sequence[mx.array], *, held: int | None = None) -> Self:
        cache = super().with_state(state, held=held)
        cache._fetched = None
        return cache

    def trim(self, n: int) -> int:
        n = super().trim(n)
        if n:
            self._fetched = None
        return n

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """Return what the last update handed out; before any, the ring up to the rung."""
        return self._fetched or self._up_to_rung()

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Write `[B, heads, L, width]` keys and values, advance, and return what attention reads.

        A single token reads the ring that holds it. The tokens of a chunk read the ring as it was before them, and
        then the chunk itself: the last of them may overwrite what the first of them still sees.
        """
        length = keys.shape[2]
        require_fitting(type(self), [keys, values], self._buffers())
        self._reserve(length)
        before = self._up_to_rung() if length > 1 else None
        self._set_buffers([self._written(b, n) for b, n in zip(self._buffers(), (keys, values), strict=True)])
        self._advance(length)
        if before is None:
            self._fetched = self._up_to_rung()
        else:
            old_keys, old_values = before
            self._fetched = (
                mx.concatenate([old_keys, keys], axis=2),
                mx.concatenate([old_values, values], axis=2),
            )
        return self._fetched

    def _written(self, buffer: mx.array, new: mx.array) -> mx.array:
        """Return the buffer with the tokens that come now."""
        now, length = self._now(), new.shape[2]
        if length == 1 or self.slots >= self.capacity:
            return mx.slice_update(buffer, new, self._slot_of(now), axes=(2,))
        turning = self.slots - self.keep
        if self.keep:
            at = mx.arange(self.keep) - now
            chosen = mx.take(new, mx.clip(at, 0, length - 1), axis=2)
            given = mx.reshape((at >= 0) & (at < length), (-1, 1))
            buffer = mx.slice_update(
                buffer, mx.where(given, chosen, buffer[:, :, : self.keep]), mx.array([0]), axes=(2,)
            )
        # Only the last to come of those that share a slot.
        last = min(length, turning)
        slots = self._slot_of(now + mx.arange(length - last, length))
        latest = new[:, :, length - last :]
        return mx.put_along_axis(
            buffer, mx.broadcast_to(mx.reshape(slots, (1, 1, -1, 1)), latest.shape), latest, axis=2
        )

    def _slot_of(self, time: mx.array) -> mx.array:
        if self.slots >= self.capacity:
            return time
        turning = (time - self.keep) % (self.slots - self.keep) + self.keep
        return turning if not self.keep else mx.where(time < self.keep, time, turning)

    def _key_times(self, N: int) -> mx.array:
        now = self._now()
        # A single token is written before it is read, so the ring is looked at as it is then.
        latest = now if N == 1 else now - 1
        slots = mx.arange(self._rung)
        if self.slots >= self.capacity:
            times = mx.where(slots <= latest, slots, NEVER)
        else:
            times = latest - (latest - slots) % (self.slots - self.keep)
            if self.keep:
                times = mx.where(slots < self.keep, slots, mx.where(times < self.keep, NEVER, times))
                times = mx.where(times <= latest, times, NEVER)
            else:
                times = mx.where(times < 0, NEVER, times)
        return times if N == 1 else mx.concatenate([times, now + mx.arange(N)])

    def _placed(self, content: mx.array, held: int, time: int) -> mx.array:
        count = content.shape[2]
        if time <= self.slots:
            return super()._placed(content, held, time)
        # The kept tokens come first in `content`; the others are the latest.
        turning = self.slots - self.keep
        order = []
        for slot in range(self.slots):
            at = slot if slot < self.keep else time - 1 - (time - 1 - slot) % turning
            # From the time of a token to its place in `content`; a padded slot holds any finite number.
            order.append(max(0, at if slot < self.keep else count - (time - at)))
        return mx.take(content, mx.array(order, mx.int32), axis=2)

    def _can_forget(self, n: int) -> bool:
        held = self.count() or 0
        return (held <= self.slots or not n) and super()._can_forget(n)
