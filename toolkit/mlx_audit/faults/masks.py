"""What a mask may show or hide, and what lies in the slots that it hides."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx

from mlx_audit.caches import FixedCapacityKVCache as Cache
from mlx_audit.faults.base import Patch, fault


def _mask(visible: Callable[[Cache, mx.array, mx.array, int], mx.array]) -> Callable[..., mx.array]:
    """Return a `make_mask` with another rule of what a query sees."""

    def make_mask(
        self: Cache, N: int, *, window_size: int | None = None, return_array: bool = True
    ) -> mx.array:
        queries, slots = mx.expand_dims(self._position + mx.arange(N), 1), mx.arange(self._rung)
        mask = visible(self, queries, slots, N)
        if window_size is not None:
            mask = mask & (queries < slots + window_size)
        return mx.expand_dims(mask, (0, 1))

    return make_mask


@fault("MSK001", needs="linear")
def mask_hides_the_token_itself(patch: Patch) -> None:
    """`>` instead of `>=`."""
    patch.setattr(Cache, "make_mask", _mask(lambda cache, queries, slots, N: queries > slots))


@fault("MSK001", needs="linear")
def mask_shows_one_ahead(patch: Patch) -> None:
    """The causal edge is one slot too late."""
    patch.setattr(Cache, "make_mask", _mask(lambda cache, queries, slots, N: queries + 1 >= slots))


@fault("MSK001", needs="linear")
def mask_of_a_chunk_shows_one_ahead(patch: Patch) -> None:
    """Single tokens are right; in a chunk each token sees the next."""
    patch.setattr(
        Cache, "make_mask", _mask(lambda cache, queries, slots, N: queries + (1 if N > 1 else 0) >= slots)
    )


@fault("MSK001", needs="linear")
def mask_forgets_the_first_token(patch: Patch) -> None:
    """Slot 0 is hidden."""
    patch.setattr(
        Cache, "make_mask", _mask(lambda cache, queries, slots, N: (queries >= slots) & (slots > 0))
    )


@fault("MSK002", needs="linear")
def mask_shows_all(patch: Patch) -> None:
    """Nothing is hidden."""
    patch.setattr(Cache, "make_mask", _mask(lambda cache, queries, slots, N: queries * 0 <= slots))


@fault("MSK001", needs="linear")
def mask_row_all_false(patch: Patch) -> None:
    """The last token of a chunk sees nothing: its attention is the mean of all values."""
    patch.setattr(
        Cache,
        "make_mask",
        _mask(lambda cache, queries, slots, N: (queries >= slots) & (mx.arange(N)[:, None] < max(1, N - 1))),
    )


@fault("MSK001", needs="linear")
def mask_window_too_wide(patch: Patch) -> None:
    """A window shows one slot too many; full attention is right."""

    def make_mask(
        self: Cache, N: int, *, window_size: int | None = None, return_array: bool = True
    ) -> mx.array:
        queries, slots = mx.expand_dims(self._position + mx.arange(N), 1), mx.arange(self._rung)
        mask = queries >= slots
        if window_size is not None:
            mask = mask & (queries <= slots + window_size)
        return mx.expand_dims(mask, (0, 1))

    patch.setattr(Cache, "make_mask", make_mask)


@fault("MSK002", needs="linear")
def mask_by_content(patch: Patch) -> None:
    """A slot counts as empty where its keys are zero, so that forgotten tokens stay in sight after a trim."""

    def visible(cache: Cache, queries: mx.array, slots: mx.array, N: int) -> mx.array:
        held = mx.any(cache.keys[0, :, : cache._rung] != 0, axis=(0, 2))
        return held | (queries >= slots) if N == 1 else queries >= slots

    patch.setattr(Cache, "make_mask", _mask(visible))


def _unwritten_hold(value: float, *names: str) -> Any:
    """Return an `adopt` that leaves a value in the slots without a token of some buffers."""
    own = Cache.adopt.__func__  # type: ignore[attr-defined]

    def adopt(cls: type[Cache], native: Any, max_tokens: int) -> Cache:
        cache = own(cls, native, max_tokens)
        unwritten = mx.reshape(mx.arange(cache.slots) >= native.offset, (-1, 1))
        for name in names:
            setattr(cache, name, mx.where(unwritten, value, getattr(cache, name)))
        return cache

    return classmethod(adopt)


@fault("MSK002", needs="linear")
def unwritten_slots_hold_nan(patch: Patch) -> None:
    """Buffers are not allocated with zeros."""
    patch.setattr(Cache, "adopt", _unwritten_hold(mx.nan, "keys", "values"))


@fault("MSK002", needs="linear")
def unwritten_slots_hold_infinity(patch: Patch) -> None:
    """Buffers of keys are allocated with infinity, values with zeros."""
    patch.setattr(Cache, "adopt", _unwritten_hold(mx.inf, "keys"))
