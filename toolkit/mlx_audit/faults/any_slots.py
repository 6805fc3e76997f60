"""What may go wrong in any cache that has slots, whatever its kind: a value that stands still, an edge off by one."""

from __future__ import annotations

import copy
from typing import Any

import mlx.core as mx

from mlx_audit.caches.slots import SlottedCache
from mlx_audit.faults.base import Patch, fault


def _moved(cache: SlottedCache, position: mx.array) -> SlottedCache:
    """Return a cache that takes another position for its own."""
    other = copy.copy(cache)
    other._position = position
    if cache._time is not None:
        other._time = cache._time + (position - cache._position)[:1]
    return other


def _mask_at(patch: Patch, shift: int) -> None:
    """Make masks for another position than the one that is written to."""
    own = SlottedCache.make_mask

    def make_mask(self: SlottedCache, N: int, **options: Any) -> mx.array:
        return own(_moved(self, self._position + shift), N, **options)

    patch.setattr(SlottedCache, "make_mask", make_mask)


@fault("MSK001", needs="slots")
def mask_one_position_late(patch: Patch) -> None:
    """Masks are made after the position has moved: each token sees one slot ahead."""
    _mask_at(patch, 1)


@fault("MSK001", needs="slots")
def mask_one_position_early(patch: Patch) -> None:
    """Masks are made for the position before: a token does not see itself."""
    _mask_at(patch, -1)


@fault("TRC005", needs="slots")
def frozen_mask(patch: Patch) -> None:
    """The mask is that of one position for ever, as if a host integer had been traced."""
    own = SlottedCache.make_mask

    def make_mask(self: SlottedCache, N: int, **options: Any) -> mx.array:
        if N > 1:
            return own(self, N, **options)
        return own(_moved(self, mx.full(self._position.shape, 5, mx.int32)), N, **options)

    patch.setattr(SlottedCache, "make_mask", make_mask)


@fault("STA001", needs="slots rope")
def frozen_rope(patch: Patch) -> None:
    """Every token is rotated as the fourth one is, as if a host integer had been traced."""
    patch.setattr(SlottedCache, "offset", property(lambda self: mx.full(self._position.shape, 3, mx.int32)))


@fault("MSK002", needs="slots")
def nothing_hidden(patch: Patch) -> None:
    """Attention runs over the whole buffer, unmasked."""
    own = SlottedCache.make_mask

    def make_mask(self: SlottedCache, N: int, **options: Any) -> mx.array:
        mask = own(self, N, **options)
        return mask | (mx.broadcast_to(self._now(), (1,)) >= 0)

    patch.setattr(SlottedCache, "make_mask", make_mask)


@fault("STA003", needs="trims")
def trim_forgets_one_less(patch: Patch) -> None:
    """Trim keeps the first of the tokens that it was to forget, and says that it did not."""
    own = SlottedCache.trim

    def trim(self: SlottedCache, n: int) -> int:
        return n if n > 0 and own(self, n - 1) == n - 1 else own(self, n)

    patch.setattr(SlottedCache, "trim", trim)


@fault("CAP002", needs="slots")
def write_clamped_to_the_last_slot(patch: Patch) -> None:
    """Nobody counts; a token that does not fit overwrites the last one."""
    from mlx_audit.decode import CompiledDecodeSession as Session

    own = SlottedCache._advance

    def advance(self: SlottedCache, length: int) -> None:
        own(self, length)
        self._position = mx.minimum(self._position, self.capacity - 1)

    patch.setattr(SlottedCache, "_advance", advance)
    patch.setattr(SlottedCache, "_reserve", lambda self, length: None)
    patch.setattr(Session, "_reserve", lambda self, count, call: None)


@fault("MSK003", needs="slots")
def scaled_by_the_capacity(patch: Patch) -> None:
    """Something in the step depends on how large the buffer is: here, keys grow with it."""
    own = SlottedCache.offset.fget  # type: ignore[attr-defined]
    patch.setattr(SlottedCache, "offset", property(lambda self: own(self) + self.capacity // 32))


@fault("PAR007", needs="linear")
def mask_wrong_beyond_300(patch: Patch) -> None:
    """From the 300th token on the first one is forgotten; short texts never show it."""
    own = SlottedCache._visible

    def visible(self: SlottedCache, queries: mx.array, times: mx.array, window: int | None) -> mx.array:
        return own(self, queries, times, window) & ((queries < 300) | (times > 0))

    patch.setattr(SlottedCache, "_visible", visible)
