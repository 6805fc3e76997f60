"""FixedCapacityRotatingCache: rings of every size, adopted from rings in every state."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import KVCache, RotatingKVCache

from cache_oracle import (
    WIDTHS,
    adopted,
    feed,
    feed_native,
    filled_native,
    forms,
    marks,
    merged,
    rotating,
    wanted,
)
from mlx_audit.caches.rotating import FixedCapacityRotatingCache
from mlx_audit.errors import CapacityExceeded, HostState, ShapeMismatch
from tiny_models import raw


def rising(count: int, first: int = 1) -> list[int]:
    return list(range(first, first + count))


@pytest.mark.parametrize("window", range(1, 10))
@pytest.mark.parametrize("capacity", [-1, 0, 1, 30])
def test_every_window_and_keep_through_two_wraps(window: int, capacity: int) -> None:
    """Capacities below, at and above the window."""
    capacity = max(1, window + capacity)
    for keep in {0, window // 2, window - 1}:
        kind, ids = rotating(window, keep), [[1]]
        cache = adopted(kind, ids, 1, capacity)
        assert cache.slots == min(window, capacity)
        while len(ids[0]) < capacity:
            new = [[len(ids[0]) + 1]]
            seen = feed(cache, kind, new)
            ids = [ids[0] + new[0]]
            assert seen == wanted(kind, ids, 1)


@pytest.mark.parametrize("keep", [0, 1, 4])
@pytest.mark.parametrize("length", range(1, 14))
def test_chunks_across_the_wrap_and_longer_than_the_ring(keep: int, length: int) -> None:
    kind = rotating(5, keep)
    for start in (1, 3, 5, 6, 12):
        ids = [rising(start)]
        cache = adopted(kind, ids, 4, 40)
        for count in (length, 1, length):
            new = [rising(count, len(ids[0]) + 1)]
            seen = feed(cache, kind, new)
            ids = [ids[0] + new[0]]
            assert seen == wanted(kind, ids, count)


@pytest.mark.parametrize("keep", [0, 2])
@pytest.mark.parametrize("chunk", [1, 2, 3, 6, 7, 20])
def test_adoption_of_rings_half_full_turned_and_too_long(keep: int, chunk: int) -> None:
    kind = rotating(6, keep)
    for held in range(1, 21):
        ids = [rising(held)]
        cache = adopted(kind, ids, chunk, 30)
        assert feed(cache, kind, [[held + 1]]) == wanted(kind, [rising(held + 1)], 1)


@pytest.mark.parametrize("window", [None, 1, 3, 5, 9])
def test_a_window_smaller_than_the_ring_is_that_of_mlx_lm(window: int | None) -> None:
    kind = rotating(5)
    native, cache = filled_native(kind, [[1]], 1), adopted(kind, [[1]], 1, 30)
    for token in range(2, 25):
        mask = native.make_mask(1, window_size=window)
        keys, _ = native.update_and_fetch(*marks([[token]], WIDTHS))
        shown = keys[0, 0, :, 0].tolist()
        flags = [True] * len(shown) if mask is None else mask.tolist()
        seen = sorted(int(i) for i, flag in zip(shown, flags, strict=True) if flag)
        assert feed(cache, kind, [[token]], window) == [[[seen]]]


def test_shapes_and_dtypes_never_change() -> None:
    kind, ids = rotating(4), [rising(3), rising(3, 50)]
    native = kind.native()
    native.update_and_fetch(*marks(ids, WIDTHS, mx.bfloat16))
    cache = kind.cls.adopt(native, 30)
    before = forms(cache)
    assert before == [((2, 2, 4, 3), mx.bfloat16), ((2, 2, 4, 5), mx.bfloat16), ((1,), mx.int32)]
    for count in (1, 3, 7, 1):
        new = marks([rising(count), rising(count)], WIDTHS, mx.float32)
        cache.update_and_fetch(*new)  # another dtype, as after a norm in float32
        assert forms(cache) == before


def test_what_a_shared_layer_reads_is_what_the_owner_was_handed() -> None:
    """gemma3n's later layers ask the cache of an earlier one; a chunk's keys are more than the ring holds."""
    kind = rotating(4)
    cache: Any = adopted(kind, [rising(6)], 3, 30)
    for count in (1, 3):
        handed = cache.update_and_fetch(*marks([rising(count)], WIDTHS))
        assert [raw(array) for array in cache.keys_and_values()] == [raw(array) for array in handed]
    for other in (cache.copy(), cache.with_state(cache.state)):
        assert other.keys_and_values()[0].shape[2] == 4
    short: Any = adopted(kind, [rising(2)], 2, 30)
    feed(short, kind, [[3, 4]])
    short.trim(1)
    assert short.keys_and_values()[0].shape[2] == 4


@pytest.mark.parametrize("window", range(1, 10))
def test_native_round_trip_goes_on_like_the_native_ring(window: int) -> None:
    for keep in {0, window - 1}:
        kind = rotating(window, keep)
        for held in range(1, 2 * window + 3):
            native = filled_native(kind, [rising(held)], 3)
            ours = kind.cls.adopt(native, held + 3).to_native()
            for token in (held + 1, held + 2, held + 3):
                feed_native(kind, native, [[token]])
                feed_native(kind, ours, [[token]])
                assert ours.offset == native.offset
                one, other = (set(n.keys_and_values()[0][0, 0, :, 0].tolist()) for n in (ours, native))
                assert one == other


def test_trim_is_exact_or_refused() -> None:
    kind = rotating(8)
    for held, n, done in ((7, 6, 6), (8, 3, 3), (8, 8, 8), (9, 1, 0), (9, 9, 0), (20, 6, 0), (9, 0, 0)):
        cache = adopted(kind, [rising(held)], 1, 30)
        before = [raw(array) for array in cache.state]
        assert cache.trim(n) == done
        if not done:
            assert [raw(array) for array in cache.state] == before
        left = rising(held - done)
        assert feed(cache, kind, [[99]]) == wanted(kind, [[*left, 99]], 1)


def test_a_ring_that_holds_the_capacity_forgets_anything() -> None:
    kind = rotating(8, 3)
    cache = adopted(kind, [rising(5)], 1, 5)
    assert cache.trim(5) == 5
    assert feed(cache, kind, [[7, 8, 9]]) == wanted(kind, [[7, 8, 9]], 3)


def test_ragged_rows_each_see_their_own() -> None:
    kind, rows = rotating(5), [rising(3), rising(9, 30), rising(1, 60)]
    cache = merged(kind, rows, 4, 40)
    assert forms(cache)[2:] == [((3,), mx.int32), ((1,), mx.int32)]
    for count in (1, 1, 4, 7, 1):
        new = [rising(count, 100 * index + 100 + len(row)) for index, row in enumerate(rows)]
        seen = feed(cache, kind, new)
        rows = [row + more for row, more in zip(rows, new, strict=True)]
        assert seen == wanted(kind, rows, count)
    assert cache.trim(1) == 0


def test_ragged_rows_cannot_share_a_ring_that_keeps() -> None:
    kind = rotating(5, 2)
    with pytest.raises(ShapeMismatch, match="keeps its first tokens"):
        merged(kind, [rising(3), rising(9)], 4, 40)
    with pytest.raises(ShapeMismatch, match="keeps its first tokens"):
        adopted(kind, [rising(3)], 4, 40).padded()


def test_rings_cut_after_they_had_turned_are_refused() -> None:
    """mlx-lm's `trim` asks nothing; what it leaves holds later tokens where earlier ones should be."""
    for chunk, held, n in ((1, 20, 6), (1, 9, 1), (1, 10, 2), (4, 20, 2), (5, 23, 4), (7, 20, 6)):
        native = filled_native(rotating(8), [rising(held)], chunk)
        assert native.trim(n) == n
        with pytest.raises(HostState, match="cut after it had turned"):
            FixedCapacityRotatingCache.adopt(native, 40)


def test_a_ring_cut_after_it_had_turned_may_look_like_one_that_was_not() -> None:
    """The limit of what adoption can refuse: nothing in the ring tells how many tokens it was fed."""
    cut, uncut = filled_native(rotating(8), [rising(21)], 1), filled_native(rotating(8), [rising(19)], 1)
    cut.trim(2)
    assert (cut.offset, cut._idx, cut.keys.shape) == (uncut.offset, uncut._idx, uncut.keys.shape)
    assert raw(cut.keys) != raw(uncut.keys)


def test_rings_cut_while_all_tokens_were_there_are_adopted() -> None:
    for chunk, held, n in ((1, 7, 3), (3, 8, 8), (20, 20, 6), (1, 8, 1), (7, 14, 6)):
        kind = rotating(8)
        native = filled_native(kind, [rising(held)], chunk)
        native.trim(n)
        cache = kind.cls.adopt(native, 40)
        assert feed(cache, kind, [[99]]) == wanted(kind, [[*rising(held - n), 99]], 1)


def test_a_ring_never_written_has_no_state_and_cannot_be_written() -> None:
    cache: Any = FixedCapacityRotatingCache.adopt(RotatingKVCache(4), 9)
    assert (cache.state, cache.roles, cache.slots, cache.count(), cache.empty()) == ([], [], 0, None, True)
    assert cache.trim(3) == 3
    assert cache.copy().at_rung(5).with_state([]).state == []
    assert type(cache.to_native()) is RotatingKVCache
    assert cache.padded().state == []
    with pytest.raises(HostState, match="left unwritten is written in decode"):
        cache.update_and_fetch(*marks([[1]], WIDTHS))


def test_refusals() -> None:
    with pytest.raises(HostState, match="only mlx-lm's RotatingKVCache"):
        FixedCapacityRotatingCache.adopt(KVCache(), 9)
    with pytest.raises(CapacityExceeded):
        adopted(rotating(4), [rising(6)], 1, 5)
    keys, values = marks([rising(4)], WIDTHS)
    position = mx.zeros((1,), mx.int32)
    for window, keep in ((0, 0), (4, 4), (4, -1), (-1, 0)):
        with pytest.raises(ShapeMismatch, match="a ring needs room"):
            FixedCapacityRotatingCache(keys, values, position, 9, window, keep)
    for window, capacity in ((5, 9), (3, 9), (9, 5)):
        with pytest.raises(ShapeMismatch, match="slots"):
            FixedCapacityRotatingCache(keys, values, position, capacity, window)
