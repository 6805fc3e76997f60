"""FixedCapacityChunkedCache: attention inside chunks, from native caches whose front was dropped or not."""

from __future__ import annotations

from typing import Any

import pytest
from mlx_lm.models.cache import ChunkedKVCache, RotatingKVCache

from cache_oracle import WIDTHS, adopted, chunked, feed, filled_native, marks, merged, wanted
from mlx_audit.caches.chunked import FixedCapacityChunkedCache
from mlx_audit.errors import HostState, ShapeMismatch
from tiny_models import raw


def rising(count: int, first: int = 1) -> list[int]:
    return list(range(first, first + count))


@pytest.mark.parametrize("chunk", range(1, 10))
@pytest.mark.parametrize("capacity", [-1, 0, 1, 30])
def test_a_token_sees_its_chunk_and_no_other(chunk: int, capacity: int) -> None:
    kind, ids = chunked(chunk), [[1]]
    cache = adopted(kind, ids, 1, max(1, chunk + capacity))
    assert cache.slots == min(chunk, cache.capacity)
    while len(ids[0]) < cache.capacity:
        new = [[len(ids[0]) + 1]]
        seen = feed(cache, kind, new)
        ids = [ids[0] + new[0]]
        assert seen == wanted(kind, ids, 1)


@pytest.mark.parametrize("length", range(2, 11))
def test_several_tokens_across_chunks(length: int) -> None:
    for start in (1, 3, 4, 5, 9):
        kind, ids = chunked(4), [rising(start)]
        cache = adopted(kind, ids, 3, 40)
        for count in (length, 1, length):
            new = [rising(count, len(ids[0]) + 1)]
            seen = feed(cache, kind, new)
            ids = [ids[0] + new[0]]
            assert seen == wanted(kind, ids, count)


@pytest.mark.parametrize("read", [1, 2, 3, 4, 5, 20])
def test_adoption_whatever_the_chunks_of_the_prompt(read: int) -> None:
    kind = chunked(4)
    for held in range(1, 15):
        cache = adopted(kind, [rising(held)], read, 30)
        assert feed(cache, kind, [[99]]) == wanted(kind, [[*rising(held), 99]], 1)


def test_native_round_trip_holds_the_same_tokens() -> None:
    for held in range(1, 15):
        native = adopted(chunked(4), [rising(held)], 3, 30).to_native()
        assert (native.offset, native.chunk_size) == (held, 4)
        native.maybe_trim_front()
        shown = native.keys[0, 0, : native.offset - native.start_position, 0].tolist()
        assert shown == rising(held)[-4:]


def test_ragged_rows_count_chunks_from_their_own_first_token() -> None:
    kind, rows = chunked(4), [rising(3), rising(9, 30), rising(1, 60)]
    cache = merged(kind, rows, 3, 40)
    for count in (1, 1, 4, 7, 1):
        new = [rising(count, 100 * index + 100 + len(row)) for index, row in enumerate(rows)]
        seen = feed(cache, kind, new)
        rows = [row + more for row, more in zip(rows, new, strict=True)]
        assert seen == wanted(kind, rows, count)


def test_trim_is_exact_or_refused() -> None:
    for held, n, done in ((3, 2, 2), (4, 4, 4), (5, 1, 0), (10, 8, 0)):
        kind = chunked(4)
        cache = adopted(kind, [rising(held)], 2, 30)
        before = [raw(array) for array in cache.state]
        assert cache.trim(n) == done
        if not done:
            assert [raw(array) for array in cache.state] == before
        assert feed(cache, kind, [[99]]) == wanted(kind, [[*rising(held - done), 99]], 1)


def test_chunks_cut_after_their_front_was_dropped_are_refused() -> None:
    """mlx-lm's cache says that it can be cut at any time; the tokens dropped in front do not come back."""
    native = filled_native(chunked(4), [rising(10)], 1)
    native.maybe_trim_front()
    assert native.is_trimmable()
    assert native.trim(2) == 2
    with pytest.raises(HostState, match="cut after its front was dropped"):
        FixedCapacityChunkedCache.adopt(native, 40)
    native = filled_native(chunked(4), [rising(10)], 10)  # nothing was dropped yet
    native.trim(3)
    cache = FixedCapacityChunkedCache.adopt(native, 40)
    assert feed(cache, chunked(4), [[99]]) == wanted(chunked(4), [[*rising(7), 99]], 1)


def test_refusals_and_an_unwritten_cache() -> None:
    with pytest.raises(HostState, match="only mlx-lm's ChunkedKVCache"):
        FixedCapacityChunkedCache.adopt(RotatingKVCache(4), 9)
    cache: Any = FixedCapacityChunkedCache.adopt(ChunkedKVCache(4), 9)
    assert (cache.state, cache.count(), cache.chunk_size, cache.to_native().keys) == ([], None, 4, None)
    cache.maybe_trim_front()
    with pytest.raises(HostState, match="left unwritten is written in decode"):
        cache.update_and_fetch(*marks([[1]], WIDTHS))
    keys, values = marks([rising(4)], WIDTHS)
    position = adopted(chunked(4), [rising(4)], 1, 9).state[2]
    for chunk, capacity in ((0, 9), (5, 9), (3, 9), (9, 5)):
        with pytest.raises(ShapeMismatch):
            FixedCapacityChunkedCache(keys, values, position, capacity, chunk)
