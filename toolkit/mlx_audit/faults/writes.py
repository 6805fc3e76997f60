"""What a cache may write wrongly, and where."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx

from mlx_audit.caches import FixedCapacityKVCache as Cache
from mlx_audit.faults.base import Patch, fault


def _written(
    *,
    start: Callable[[Cache], mx.array] | None = None,
    new: Callable[[Cache, mx.array, mx.array], mx.array] | None = None,
) -> Callable[..., Any]:
    """Return an `update_and_fetch` that writes at another place, or other values."""

    def update_and_fetch(self: Cache, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        at = start(self) if start else self._position
        for name, array in (("keys", keys), ("values", values)):
            buffer = getattr(self, name)
            piece = new(self, buffer, array) if new else array
            setattr(self, name, mx.slice_update(buffer, piece, at, axes=(2,)))
        self._position = self._position + keys.shape[2]
        return self.keys_and_values()

    return update_and_fetch


@fault("TRC004", needs="linear")
def frozen_write(patch: Patch) -> None:
    """Every token goes into one slot."""
    patch.setattr(Cache, "update_and_fetch", _written(start=lambda cache: mx.array([3], mx.int32)))


@fault("STA001", needs="linear")
def write_one_late(patch: Patch) -> None:
    """Each token goes into the slot after its own."""
    patch.setattr(Cache, "update_and_fetch", _written(start=lambda cache: cache._position + 1))


@fault("STA001", needs="linear")
def write_one_early(patch: Patch) -> None:
    """Each token overwrites the one before it."""
    patch.setattr(Cache, "update_and_fetch", _written(start=lambda cache: cache._position - 1))


@fault("STA001", needs="linear")
def write_dropped_from_16(patch: Patch) -> None:
    """From position 16 on nothing is written: the slot keeps what it had."""

    def new(cache: Cache, buffer: mx.array, piece: mx.array) -> mx.array:
        old = mx.slice(buffer, cache._position, (2,), piece.shape)
        return mx.where(cache._position < 16, piece, old)

    patch.setattr(Cache, "update_and_fetch", _written(new=new))


@fault("TRC004", needs="linear")
def write_by_select(patch: Patch) -> None:
    """The buffer is rebuilt by `where` instead of written by index, and only below slot 16."""

    def update_and_fetch(self: Cache, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        here = (mx.arange(self.capacity) == self._position) & (self._position < 16)
        here = here[None, None, :, None]
        self.keys, self.values = mx.where(here, keys, self.keys), mx.where(here, values, self.values)
        self._position = self._position + 1
        return self.keys_and_values()

    patch.setattr(Cache, "update_and_fetch", update_and_fetch)


@fault("STA001", needs="linear")
def keys_and_values_swapped(patch: Patch) -> None:
    """Keys go into the buffer of values, and values into that of keys."""
    own = Cache.update_and_fetch
    patch.setattr(Cache, "update_and_fetch", lambda self, keys, values: own(self, values, keys))


@fault("TRC004", needs="linear")
def values_never_written(patch: Patch) -> None:
    """Values come out as they went in."""

    def update_and_fetch(self: Cache, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        self.keys = mx.slice_update(self.keys, keys, self._position, axes=(2,))
        self._position = self._position + keys.shape[2]
        return self.keys_and_values()

    patch.setattr(Cache, "update_and_fetch", update_and_fetch)


@fault("STA001", needs="linear")
def two_slots_written(patch: Patch) -> None:
    """Each write spills into the next slot, which the next token overwrites; the last one overruns the buffer."""

    def new(cache: Cache, buffer: mx.array, piece: mx.array) -> mx.array:
        return mx.concatenate([piece, piece[:, :, -1:] * 0.5], axis=2)

    patch.setattr(Cache, "update_and_fetch", _written(new=new))


@fault("TRC003", needs="linear")
def fetched_zeros(patch: Patch) -> None:
    """The token is written, but attention is handed a buffer of its own making."""
    own = Cache.update_and_fetch

    def update_and_fetch(self: Cache, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        keys, values = own(self, keys, values)
        return mx.zeros(keys.shape, keys.dtype), mx.zeros(values.shape, values.dtype)

    patch.setattr(Cache, "update_and_fetch", update_and_fetch)


@fault("PAR001", needs="linear")
def fetched_a_cut(patch: Patch) -> None:
    """Attention is handed the first 20 slots, whatever the position."""
    own = Cache.update_and_fetch

    def update_and_fetch(self: Cache, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        keys, values = own(self, keys, values)
        return keys[..., :20, :], values[..., :20, :]

    patch.setattr(Cache, "update_and_fetch", update_and_fetch)


@fault("TRC003", needs="linear")
def buffer_made_anew(patch: Patch) -> None:
    """Each step writes into a fresh buffer: only the last token is kept."""
    own = Cache.update_and_fetch

    def update_and_fetch(self: Cache, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        self.keys = mx.zeros(self.keys.shape, self.keys.dtype)
        return own(self, keys, values)

    patch.setattr(Cache, "update_and_fetch", update_and_fetch)
