"""What rings may confuse: slots with times, what is kept with what turns, and the edge of a window."""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from mlx_audit.caches.ring import RingCache as Ring
from mlx_audit.caches.rotating import FixedCapacityRotatingCache as Rotating
from mlx_audit.faults.base import Patch, fault


@fault("MSK001", needs="ring")
def ring_window_by_slot(patch: Patch) -> None:
    """A slot's number is taken for its token's time: right until the ring turns."""
    own = Ring._key_times

    def key_times(self: Ring, N: int) -> mx.array:
        times = own(self, N)
        slots = mx.arange(times.shape[0])
        return mx.where((slots < self._rung) & (times >= 0), slots, times)

    patch.setattr(Ring, "_key_times", key_times)


@fault("MSK001", needs="rotating")
def ring_window_too_narrow(patch: Patch) -> None:
    """The oldest token of the window is not seen."""

    def visible(self: Rotating, queries: mx.array, times: mx.array, window: int | None) -> mx.array:
        seen = self.window - self.keep if window is None else min(window, self.window - self.keep)
        mask = (queries >= times) & (queries < times + max(1, seen - 1))
        return mask | ((times >= 0) & (times < self.keep) & (queries >= times))

    patch.setattr(Rotating, "_visible", visible)


@fault("MSK001", needs="keep")
def ring_overwrites_what_it_keeps(patch: Patch) -> None:
    """All slots are written in turn, the first ones too."""
    own = Ring._slot_of
    patch.setattr(Ring, "_slot_of", lambda self, time: time % self.slots if self.keep else own(self, time))


@fault("STA001", needs="ring")
def ring_write_one_early(patch: Patch) -> None:
    """A single token overwrites the one before it."""
    own = Ring._written

    def written(self: Ring, buffer: mx.array, new: mx.array) -> mx.array:
        if new.shape[2] > 1:
            return own(self, buffer, new)
        return mx.slice_update(buffer, new, (self._slot_of(self._now()) - 1) % self.slots, axes=(2,))

    patch.setattr(Ring, "_written", written)


@fault("STA005", needs="ring")
def turned_ring_adopted_in_slot_order(patch: Patch) -> None:
    """A native ring that has turned is taken over as if its oldest token lay in its first slot."""
    own = Ring._placed

    def placed(self: Ring, content: mx.array, held: int, time: int) -> mx.array:
        if time <= self.slots or content.shape[2] != self.slots:
            return own(self, content, held, time)
        return content

    patch.setattr(Ring, "_placed", placed)


@fault("MSK001", needs="ring")
def chunk_read_after_it_is_written(patch: Patch) -> None:
    """A chunk reads the ring that it has already written: what its first tokens still need is overwritten."""
    own = Ring.update_and_fetch

    def update_and_fetch(self: Ring, keys: mx.array, values: mx.array) -> Any:
        fetched = own(self, keys, values)
        if keys.shape[2] == 1:
            return fetched
        kept = zip(self._up_to_rung(), (keys, values), strict=True)
        self._fetched = tuple(mx.concatenate([ring, new], axis=2) for ring, new in kept)  # type: ignore[assignment]
        return self._fetched

    patch.setattr(Ring, "update_and_fetch", update_and_fetch)
