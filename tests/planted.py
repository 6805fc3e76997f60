"""Planted faults: what is wrong with a cache, a step or a session in each, as a small patch of ours.

A fault is a function of pytest's `monkeypatch`; its docstring says what a user would have done wrong.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import pytest

from mlx_audit.caches import FixedCapacityKVCache as Cache
from mlx_audit.decode import CompiledDecodeSession as Session

Patch = pytest.MonkeyPatch
Fault = Callable[[Patch], None]
FAULTS: dict[str, Fault] = {}


def fault(function: Fault) -> Fault:
    FAULTS[function.__name__] = function
    return function


def _written(
    *, start: Callable[[Cache], mx.array] | None = None, new: Callable[[Cache, mx.array, mx.array], mx.array] | None = None
) -> Callable[..., Any]:
    """Return an `update_and_fetch` that writes at another place, or other values."""

    def update_and_fetch(self: Cache, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        at = start(self) if start else self._position
        for name, array in (("keys", keys), ("values", values)):
            buffer = getattr(self, name)
            piece = new(self, buffer, array) if new else array
            setattr(self, name, mx.slice_update(buffer, piece, at, axes=(2,)))
        self._position = self._position + keys.shape[2]
        return self.keys, self.values

    return update_and_fetch


def _mask(visible: Callable[[Cache, mx.array, mx.array, int], mx.array]) -> Callable[..., mx.array]:
    """Return a `make_mask` with another rule of what a query sees."""

    def make_mask(self: Cache, N: int, *, window_size: int | None = None, return_array: bool = True) -> mx.array:
        queries, slots = mx.expand_dims(self._position + mx.arange(N), 1), mx.arange(self.capacity)
        mask = visible(self, queries, slots, N)
        if window_size is not None:
            mask = mask & (queries < slots + window_size)
        return mx.expand_dims(mask, (0, 1))

    return make_mask


# Writes


@fault
def frozen_write(patch: Patch) -> None:
    """Every token goes into one slot."""
    patch.setattr(Cache, "update_and_fetch", _written(start=lambda cache: mx.array([3], mx.int32)))


@fault
def write_one_late(patch: Patch) -> None:
    """Each token goes into the slot after its own."""
    patch.setattr(Cache, "update_and_fetch", _written(start=lambda cache: cache._position + 1))


@fault
def write_one_early(patch: Patch) -> None:
    """Each token overwrites the one before it."""
    patch.setattr(Cache, "update_and_fetch", _written(start=lambda cache: cache._position - 1))


@fault
def write_dropped_from_16(patch: Patch) -> None:
    """From position 16 on nothing is written: the slot keeps what it had."""

    def new(cache: Cache, buffer: mx.array, piece: mx.array) -> mx.array:
        old = mx.slice(buffer, cache._position, (2,), piece.shape)
        return mx.where(cache._position < 16, piece, old)

    patch.setattr(Cache, "update_and_fetch", _written(new=new))


@fault
def write_by_select(patch: Patch) -> None:
    """The buffer is rebuilt by `where` instead of written by index, and only below slot 16."""

    def update_and_fetch(self: Cache, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        here = (mx.arange(self.capacity) == self._position) & (self._position < 16)
        here = here[None, None, :, None]
        self.keys, self.values = mx.where(here, keys, self.keys), mx.where(here, values, self.values)
        self._position = self._position + 1
        return self.keys, self.values

    patch.setattr(Cache, "update_and_fetch", update_and_fetch)


@fault
def keys_and_values_swapped(patch: Patch) -> None:
    """Keys go into the buffer of values, and values into that of keys."""
    own = Cache.update_and_fetch
    patch.setattr(Cache, "update_and_fetch", lambda self, keys, values: own(self, values, keys))


@fault
def values_never_written(patch: Patch) -> None:
    """Values come out as they went in."""

    def update_and_fetch(self: Cache, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        self.keys = mx.slice_update(self.keys, keys, self._position, axes=(2,))
        self._position = self._position + keys.shape[2]
        return self.keys, self.values

    patch.setattr(Cache, "update_and_fetch", update_and_fetch)


@fault
def two_slots_written(patch: Patch) -> None:
    """Each write spills into the next slot, which the next token overwrites; the last one overruns the buffer."""

    def new(cache: Cache, buffer: mx.array, piece: mx.array) -> mx.array:
        return mx.concatenate([piece, piece[:, :, -1:] * 0.5], axis=2)

    patch.setattr(Cache, "update_and_fetch", _written(new=new))


@fault
def fetched_zeros(patch: Patch) -> None:
    """The token is written, but attention is handed a buffer of its own making."""
    own = Cache.update_and_fetch

    def update_and_fetch(self: Cache, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        own(self, keys, values)
        return mx.zeros(self.keys.shape, self.keys.dtype), mx.zeros(self.values.shape, self.values.dtype)

    patch.setattr(Cache, "update_and_fetch", update_and_fetch)


@fault
def fetched_a_cut(patch: Patch) -> None:
    """Attention is handed the first 20 slots, whatever the position."""
    own = Cache.update_and_fetch

    def update_and_fetch(self: Cache, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        keys, values = own(self, keys, values)
        return keys[..., :20, :], values[..., :20, :]

    patch.setattr(Cache, "update_and_fetch", update_and_fetch)


@fault
def buffer_made_anew(patch: Patch) -> None:
    """Each step writes into a fresh buffer: only the last token is kept."""
    own = Cache.update_and_fetch

    def update_and_fetch(self: Cache, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        self.keys = mx.zeros(self.keys.shape, self.keys.dtype)
        return own(self, keys, values)

    patch.setattr(Cache, "update_and_fetch", update_and_fetch)


# Positions


@fault
def position_stands_still(patch: Patch) -> None:
    """The position comes out as it went in."""

    def update_and_fetch(self: Cache, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        self.keys = mx.slice_update(self.keys, keys, self._position, axes=(2,))
        self.values = mx.slice_update(self.values, values, self._position, axes=(2,))
        return self.keys, self.values

    patch.setattr(Cache, "update_and_fetch", update_and_fetch)


@fault
def rope_one_late(patch: Patch) -> None:
    """Keys and queries of compiled steps are rotated by one position too many."""
    patch.setattr(Cache, "offset", property(lambda self: self._position + 1))


@fault
def rope_one_early(patch: Patch) -> None:
    """Keys and queries of compiled steps are rotated by one position too few."""
    patch.setattr(Cache, "offset", property(lambda self: self._position - 1))


@fault
def rope_shifted_from_the_start(patch: Patch) -> None:
    """The prompt too is read on fixed-capacity caches, so that every position is one too many: logits hide it."""
    rope_one_late(patch)

    def prefill(self: Session, tokens: Any, lengths: Any = None) -> mx.array:
        self._state = [cache.state for cache in self._step.caches]
        return self.extend(tokens)

    patch.setattr(Session, "prefill", prefill)


@fault
def position_in_place(patch: Patch) -> None:
    """The position is advanced by `+=`, and handed out without a handle of its own."""

    def update_and_fetch(self: Cache, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        self.keys = mx.slice_update(self.keys, keys, self._position, axes=(2,))
        self.values = mx.slice_update(self.values, values, self._position, axes=(2,))
        self._position += keys.shape[2]
        return self.keys, self.values

    patch.setattr(Cache, "update_and_fetch", update_and_fetch)
    patch.setattr(Cache, "offset", property(lambda self: self._position))


# Masks


@fault
def mask_hides_the_token_itself(patch: Patch) -> None:
    """`>` instead of `>=`."""
    patch.setattr(Cache, "make_mask", _mask(lambda cache, queries, slots, N: queries > slots))


@fault
def mask_shows_one_ahead(patch: Patch) -> None:
    """The causal edge is one slot too late."""
    patch.setattr(Cache, "make_mask", _mask(lambda cache, queries, slots, N: queries + 1 >= slots))


@fault
def mask_of_a_chunk_shows_one_ahead(patch: Patch) -> None:
    """Single tokens are right; in a chunk each token sees the next."""
    patch.setattr(
        Cache, "make_mask", _mask(lambda cache, queries, slots, N: queries + (1 if N > 1 else 0) >= slots)
    )


@fault
def mask_forgets_the_first_token(patch: Patch) -> None:
    """Slot 0 is hidden."""
    patch.setattr(
        Cache, "make_mask", _mask(lambda cache, queries, slots, N: (queries >= slots) & (slots > 0))
    )


@fault
def mask_shows_all(patch: Patch) -> None:
    """Nothing is hidden."""
    patch.setattr(Cache, "make_mask", _mask(lambda cache, queries, slots, N: queries * 0 <= slots))


@fault
def mask_row_all_false(patch: Patch) -> None:
    """The last token of a chunk sees nothing: its attention is the mean of all values."""
    patch.setattr(
        Cache,
        "make_mask",
        _mask(lambda cache, queries, slots, N: (queries >= slots) & (mx.arange(N)[:, None] < max(1, N - 1))),
    )


@fault
def mask_window_too_wide(patch: Patch) -> None:
    """A window shows one slot too many; full attention is right."""

    def make_mask(self: Cache, N: int, *, window_size: int | None = None, return_array: bool = True) -> mx.array:
        queries, slots = mx.expand_dims(self._position + mx.arange(N), 1), mx.arange(self.capacity)
        mask = queries >= slots
        if window_size is not None:
            mask = mask & (queries <= slots + window_size)
        return mx.expand_dims(mask, (0, 1))

    patch.setattr(Cache, "make_mask", make_mask)


@fault
def mask_by_content(patch: Patch) -> None:
    """A slot counts as empty where its keys are zero, so that forgotten tokens stay in sight after a trim."""

    def visible(cache: Cache, queries: mx.array, slots: mx.array, N: int) -> mx.array:
        held = mx.any(cache.keys[0] != 0, axis=(0, 2))
        return held | (queries >= slots) if N == 1 else queries >= slots

    patch.setattr(Cache, "make_mask", _mask(visible))


@fault
def unwritten_slots_hold_nan(patch: Patch) -> None:
    """Buffers are not allocated with zeros."""
    own = Cache.like.__func__  # type: ignore[attr-defined]

    def like(cls: type[Cache], native: Any, max_tokens: int) -> Cache:
        cache = own(cls, native, max_tokens)
        cache.keys, cache.values = cache.keys + mx.nan, cache.values + mx.nan
        return cache

    patch.setattr(Cache, "like", classmethod(like))


@fault
def unwritten_slots_hold_infinity(patch: Patch) -> None:
    """Buffers of keys are allocated with infinity, values with zeros."""
    own = Cache.like.__func__  # type: ignore[attr-defined]

    def like(cls: type[Cache], native: Any, max_tokens: int) -> Cache:
        cache = own(cls, native, max_tokens)
        cache.keys = cache.keys + mx.inf
        return cache

    patch.setattr(Cache, "like", classmethod(like))
