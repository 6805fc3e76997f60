"""FixedCapacityCacheList: several caches in one entry stand at one position and forget together, or not at all."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import ArraysCache, CacheList, ConcatenateKVCache, KVCache

from cache_oracle import (
    Kind,
    adopted,
    chunked,
    composite,
    feed,
    forms,
    linear,
    merged,
    quantized,
    rotating,
    wanted,
)
from mlx_audit.caches import FixedCapacityCache
from mlx_audit.caches.composite import FixedCapacityCacheList
from mlx_audit.errors import HostState, ShapeMismatch
from tiny_models import raw

NESTED = composite(linear(), composite(rotating(4), chunked(3)), quantized(8))


def rising(count: int, first: int = 1) -> list[int]:
    return list(range(first, first + count))


def with_arrays(held: int) -> CacheList:
    """Return a native list of attention and a recurrence, as hybrid layers keep it."""
    attention, recurrence = adopted(linear(), [rising(held)], 1, 9).to_native(), ArraysCache(2)
    recurrence[0] = mx.array([[float(held)]])
    return CacheList(recurrence, attention)


def test_state_is_that_of_the_parts_in_order() -> None:
    cache = adopted(NESTED, [rising(6)], 4, 20)
    parts = cache.parts
    assert [part.kind for part in parts] == ["linear", "rotating", "chunked", "quantized"]
    assert [raw(a) for a in cache.state] == [raw(a) for part in parts for a in part.state]
    assert cache.roles == [role for part in parts for role in part.roles]
    assert (cache.slots, cache.extent, cache.count(), cache.rows) == (20, 20, 6, 1)
    assert (cache.at_rung(8).extent, cache.at_rung(3).extent) == (8, 3)
    native = cache.to_native()
    assert [type(part).__name__ for part in native.caches] == ["KVCache", "CacheList", "QuantizedKVCache"]
    again = FixedCapacityCacheList.adopt(native, 20)
    assert [raw(a) for a in again.state] == [raw(a) for a in cache.state]


def test_each_part_sees_its_own_rows() -> None:
    rows = [rising(2), rising(7, 30)]
    cache = merged(NESTED, rows, 3, 20)
    assert (cache.ragged, cache.rows) == (True, 2)
    for count in (1, 3, 5):
        new = [rising(count, 100 * index + 100 + len(row)) for index, row in enumerate(rows)]
        seen = feed(cache, NESTED, new)
        rows = [row + more for row, more in zip(rows, new, strict=True)]
        assert seen == wanted(NESTED, rows, count)


@pytest.mark.parametrize(
    ("held", "n", "done"), [(3, 2, 2), (3, 3, 3), (4, 2, 0), (8, 2, 0), (3, 4, 0), (3, -1, 0)]
)
def test_all_parts_forget_or_none(held: int, n: int, done: int) -> None:
    cache = adopted(NESTED, [rising(held)], 1, 20)
    before = [raw(array) for array in cache.state]
    assert cache.trim(n) == done
    assert cache.count() == held - done
    if not done:
        assert [raw(array) for array in cache.state] == before
    assert feed(cache, NESTED, [[99]]) == wanted(NESTED, [[*rising(held - done), 99]], 1)


def test_a_recurrence_beside_attention_keeps_it_from_forgetting() -> None:
    cache: Any = FixedCapacityCacheList.adopt(with_arrays(4), 9)
    assert (cache.count(), cache.is_trimmable(), cache.trim(1), cache.count()) == (4, False, 0, 4)
    assert (cache.rewinds, cache.empty()) == (False, False)
    assert adopted(composite(linear(), quantized(4)), [[1]], 1, 9).rewinds
    ragged = FixedCapacityCacheList.merge([with_arrays(4), with_arrays(2)], 9)
    assert (ragged.rows, ragged.count()) == (2, 4)
    assert ragged.parts[0].state[0].tolist() == [[4.0], [2.0]]


def test_copies_and_other_states_are_independent() -> None:
    cache = adopted(NESTED, [rising(3)], 1, 20)
    before, twin = [raw(array) for array in cache.state], cache.copy()
    feed(twin, NESTED, [[9]])
    assert [raw(array) for array in cache.state] == before
    assert (cache.count(), twin.count()) == (3, 4)
    assert forms(twin) == forms(cache)
    assert cache.with_state(twin.state).count() == 4


def test_states_that_contradict_themselves_are_refused() -> None:
    cache = adopted(composite(linear(), rotating(4)), [rising(3)], 1, 20)
    other = cache.with_state([*cache.state[:5], cache.state[5] + 1])
    for call in (other.count, other.require_sound):
        with pytest.raises(HostState, match="different positions"):
            call()
    for state in (cache.state[:5], [*cache.state, cache.state[5]], []):
        with pytest.raises(ShapeMismatch, match="number of arrays"):
            cache.with_state(state)


@pytest.mark.parametrize("make", ["like", "adopt"])
def test_a_part_of_unknown_class_is_refused(make: str) -> None:
    native = CacheList(KVCache(), CacheList(ConcatenateKVCache()))
    with pytest.raises(HostState, match=r"no fixed-capacity form.*ConcatenateKVCache"):
        getattr(FixedCapacityCacheList, make)(native, 9)


def test_a_list_of_caches_never_written_has_no_state() -> None:
    kind: Kind = composite(linear(), composite(chunked(3)))
    cache: FixedCapacityCache = FixedCapacityCacheList.adopt(kind.native(), 9)
    assert (cache.state, cache.count(), cache.slots, cache.trim(2), cache.rows) == ([], None, 0, 2, 1)
    assert cache.padded().state == cache.copy().state == []
