"""What may be wrong with rings, chunks, quantized slots, recurrent states and composite caches."""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from mlx_audit.caches.arrays import FixedCapacityArraysCache as Arrays
from mlx_audit.caches.chunked import FixedCapacityChunkedCache as Chunked
from mlx_audit.caches.composite import FixedCapacityCacheList as Composite
from mlx_audit.caches.quantized import FixedCapacityQuantizedCache as Quantized
from mlx_audit.caches.ring import RingCache as Ring
from mlx_audit.caches.rotating import FixedCapacityRotatingCache as Rotating
from mlx_audit.decode import CompiledDecodeSession as Session
from mlx_audit.faults.base import Patch, fault


@fault("MSK001", needs="ring")
def ring_turns_one_early(patch: Patch) -> None:
    """The last slot of a ring is never used: the modulus is one too small."""
    patch.setattr(Ring, "_slot_of", lambda self, time: time % (self.slots - 1))


@fault("STA001", needs="ring")
def ring_write_one_late(patch: Patch) -> None:
    """A single token is written to the slot after its own."""
    own = Ring._written

    def written(self: Ring, buffer: mx.array, new: mx.array) -> mx.array:
        if new.shape[2] > 1:
            return own(self, buffer, new)
        return mx.slice_update(buffer, new, (self._slot_of(self._now()) + 1) % self.slots, axes=(2,))

    patch.setattr(Ring, "_written", written)


@fault("MSK001", needs="rotating")
def ring_window_too_wide(patch: Patch) -> None:
    """The tokens of a chunk see one token more than the window."""

    def visible(self: Rotating, queries: mx.array, times: mx.array, window: int | None) -> mx.array:
        seen = self.window if window is None else min(window, self.window)
        return (queries >= times) & (queries <= times + seen)

    patch.setattr(Rotating, "_visible", visible)


@fault("MSK001", needs="keep")
def ring_forgets_what_it_keeps(patch: Patch) -> None:
    """The first tokens of the text fall out of sight with the others."""

    def visible(self: Rotating, queries: mx.array, times: mx.array, window: int | None) -> mx.array:
        seen = self.window - self.keep if window is None else min(window, self.window - self.keep)
        return (queries >= times) & (queries < times + seen)

    patch.setattr(Rotating, "_visible", visible)


@fault("MSK002", needs="rotating")
def ring_shows_unwritten_slots(patch: Patch) -> None:
    """Slots count as full from the first token on, and after a trim what was forgotten is seen again."""
    own = Ring._key_times

    def key_times(self: Ring, N: int) -> mx.array:
        if N > 1:
            return own(self, N)
        latest = self._now()
        return latest - (latest - mx.arange(self._rung)) % self.slots

    patch.setattr(Ring, "_key_times", key_times)


@fault("STA003", needs="ring")
def ring_takes_back_after_turning(patch: Patch) -> None:
    """A turned ring says that it trimmed: what was overwritten is gone all the same."""
    patch.setattr(Ring, "_can_forget", lambda self, n: True)


@fault("STA005", needs="rotating")
def ring_handed_over_in_slot_order(patch: Patch) -> None:
    """The native ring takes the slots for the order of time."""
    own = Rotating.to_native

    def to_native(self: Rotating) -> Any:
        native = own(self)
        native._idx = native.keys.shape[2]
        return native

    patch.setattr(Rotating, "to_native", to_native)


@fault("STA005", needs="rotating")
def ring_handed_over_emptied(patch: Patch) -> None:
    """The native ring has the right length and position, and nothing in its values."""
    own = Rotating.to_native

    def to_native(self: Rotating) -> Any:
        native = own(self)
        native.values = mx.zeros_like(native.values)
        return native

    patch.setattr(Rotating, "to_native", to_native)


@fault("MSK001", needs="chunked")
def chunk_edge_one_late(patch: Patch) -> None:
    """The first token of a chunk still belongs to the one before."""

    def visible(self: Chunked, queries: mx.array, times: mx.array, window: int | None) -> mx.array:
        mask = (queries >= times) & (times >= 0)
        return mask & ((queries - 1) // self.chunk == (times - 1) // self.chunk)

    patch.setattr(Chunked, "_visible", visible)


@fault("STA005", needs="quantized")
def quantized_without_biases(patch: Patch) -> None:
    """What is handed over has lost the biases of its keys."""
    own = Quantized.to_native

    def to_native(self: Quantized) -> Any:
        native = own(self)
        native.keys[2] = mx.zeros_like(native.keys[2])
        return native

    patch.setattr(Quantized, "to_native", to_native)


@fault("STA001", needs="quantized")
def quantized_write_one_early(patch: Patch) -> None:
    """Each token overwrites the one before it."""

    def update_and_fetch(self: Quantized, keys: mx.array, values: mx.array) -> Any:
        length, options = keys.shape[2], {"group_size": self.group_size, "bits": self.bits}
        packed = [part for array in (keys, values) for part in mx.quantize(array, **options)]
        at = self._now() - 1
        pairs = zip(self._buffers(), packed, strict=True)
        self._set_buffers([mx.slice_update(buffer, new, at, axes=(2,)) for buffer, new in pairs])
        self._advance(length)
        return self.keys_and_values()

    patch.setattr(Quantized, "update_and_fetch", update_and_fetch)


@fault("STA001", needs="arrays")
def recurrent_state_not_carried(patch: Patch) -> None:
    """The new state of a recurrence is computed and dropped."""
    patch.setattr(Arrays, "__setitem__", lambda self, index, value: None)


@fault("STA001", needs="arrays")
def recurrent_state_half_carried(patch: Patch) -> None:
    """Of several arrays the first alone is taken over from a step."""
    own = Arrays.__setitem__

    def setitem(self: Arrays, index: int, value: mx.array) -> None:
        if index == 0:
            own(self, index, value)

    patch.setattr(Arrays, "__setitem__", setitem)


@fault("STA005", needs="arrays")
def recurrent_state_handed_over_empty(patch: Patch) -> None:
    """The native cache begins anew."""
    own = Arrays.to_native

    def to_native(self: Arrays) -> Any:
        native = own(self)
        native.cache = [mx.zeros_like(array) for array in native.cache]
        return native

    patch.setattr(Arrays, "to_native", to_native)


@fault("STA003", needs="arrays")
def recurrent_state_says_it_trimmed(patch: Patch) -> None:
    """A state that cannot give a token back says that it did."""
    patch.setattr(Arrays, "trim", lambda self, n: n)


@fault("STA003", needs="composite")
def composite_trims_its_last_part(patch: Patch) -> None:
    """One part of a composite cache trims, and the answer is its own."""
    patch.setattr(Composite, "trim", lambda self, n: self.caches[-1].trim(n))


@fault("STA003", needs="rotating linear")
def session_trims_what_can(patch: Patch) -> None:
    """Where a cache refuses, the others have trimmed already."""

    def trim(self: Session, n: int) -> int:
        caches = self.caches
        trimmed = [cache.trim(n) for cache in caches]
        self._state = [cache.state for cache in caches]
        return min(trimmed)

    patch.setattr(Session, "trim", trim)


@fault("STA005", needs="composite")
def composite_hands_over_one_part(patch: Patch) -> None:
    """The first part of a composite cache is handed over as it was made, the others with their content."""
    own = Composite.to_native

    def to_native(self: Composite) -> Any:
        native = own(self)
        first = native.caches[0]
        if hasattr(first, "keys"):
            first.keys, first.values = mx.zeros_like(first.keys), mx.zeros_like(first.values)
        else:
            first.cache = [mx.zeros_like(array) for array in first.cache]
        return native

    patch.setattr(Composite, "to_native", to_native)


@fault("MSK002", needs="rotating")
def poison_spreads_from_a_ring(patch: Patch) -> None:
    """A chunk looks at what the ring holds through its oldest slot too."""

    def visible(self: Rotating, queries: mx.array, times: mx.array, window: int | None) -> mx.array:
        return (queries >= times) & (queries < times + self.window + (queries.shape[0] > 1))

    patch.setattr(Rotating, "_visible", visible)
