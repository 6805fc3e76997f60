"""FixedCapacityKVCache: shapes, adoption, refusals and copies, one contract a test."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.base import create_attention_mask
from mlx_lm.models.cache import KVCache, RotatingKVCache

from mlx_audit.caches import FixedCapacityKVCache, cache_class, kind_of
from mlx_audit.errors import CapacityExceeded, HostState, ShapeMismatch
from tiny_models import raw

HEADS, KEY_WIDTH, VALUE_WIDTH = 2, 3, 5


def rows(*ids: int, batch: int = 1, dtype: mx.Dtype = mx.float32) -> tuple[mx.array, mx.array]:
    """Return keys and values whose every element tells the token id, the batch row and the head."""
    mark = mx.array(ids)[None, None, :, None] + 100 * mx.arange(batch)[:, None, None, None]
    mark = mark + 0.25 * mx.arange(HEADS)[None, :, None, None]
    shape = (batch, HEADS, len(ids))
    keys = mx.broadcast_to(mark, (*shape, KEY_WIDTH))
    return keys.astype(dtype), mx.broadcast_to(-mark, (*shape, VALUE_WIDTH)).astype(dtype)


def prefilled(*ids: int, **options: Any) -> KVCache:
    native = KVCache()
    if ids:
        native.update_and_fetch(*rows(*ids, **options))
    return native


def adopted(*ids: int, capacity: int = 8, **options: Any) -> FixedCapacityKVCache:
    return FixedCapacityKVCache.adopt(prefilled(*ids, **options), capacity)


def content(cache: FixedCapacityKVCache) -> list[bytes]:
    return [raw(array) for array in cache.state]


def test_kind_is_found_by_class_and_by_native_class() -> None:
    assert cache_class("linear") is FixedCapacityKVCache
    assert cache_class("no such kind") is None
    assert kind_of(KVCache()) == "linear"
    assert kind_of(RotatingKVCache(max_size=4)) == "rotating"

    class Derived(KVCache):
        """A subclass may behave otherwise, so it is not taken for its base."""

    assert kind_of(Derived()) is None


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float16])
def test_shapes_and_dtypes_of_the_state_never_change(dtype: mx.Dtype) -> None:
    cache = adopted(1, 2, capacity=7, batch=2, dtype=dtype)
    forms = [(array.shape, array.dtype) for array in cache.state]
    assert forms == [
        ((2, HEADS, 7, KEY_WIDTH), dtype),
        ((2, HEADS, 7, VALUE_WIDTH), dtype),
        ((1,), mx.int32),
    ]
    for ids in ((3,), (4, 5, 6)):
        keys, values = cache.update_and_fetch(*rows(*ids, batch=2, dtype=dtype))
        assert [(array.shape, array.dtype) for array in cache.state] == forms
        assert (keys.shape, values.shape) == (forms[0][0], forms[1][0])
    assert cache.trim(2) == 2
    assert [(array.shape, array.dtype) for array in cache.state] == forms
    assert cache.nbytes == sum(array.nbytes for array in cache.state)


def test_unwritten_slots_are_zero_although_the_native_buffer_was_longer() -> None:
    native = prefilled(1, 2, 3)
    native.trim(2)  # leaves the rows of 2 and 3 in the native buffer
    cache = FixedCapacityKVCache.adopt(native, 6)
    assert float(mx.abs(cache.keys[..., 1:, :]).max()) == 0.0
    assert float(mx.abs(cache.values[..., 1:, :]).max()) == 0.0


def test_adoption_leaves_the_native_cache_as_it_was() -> None:
    native = prefilled(1, 2, 3)
    before = [raw(native.keys), raw(native.values)]
    cache = FixedCapacityKVCache.adopt(native, 4)
    cache.update_and_fetch(*rows(9))
    mx.eval(cache.state)
    assert ([raw(native.keys), raw(native.values)], native.offset) == (before, 3)


def test_offset_taken_earlier_does_not_move() -> None:
    cache = adopted(1, 2, 3)
    early, slot = cache.offset, cache.slot
    cache.update_and_fetch(*rows(4, 5))
    assert (early.item(), slot.item(), cache.offset.item()) == (3, 3, 5)


def test_state_taken_earlier_does_not_move() -> None:
    cache = adopted(1, 2, 3)
    early = cache.state
    before = [raw(array) for array in early]
    cache.update_and_fetch(*rows(4))
    cache.trim(2)
    assert [raw(array) for array in early] == before


def test_a_caller_that_adds_to_an_offset_in_place_changes_only_its_own() -> None:
    cache = adopted(1, 2, 3)
    other, mine = cache.offset, cache.offset
    mine += 40
    shared = cache.copy().offset
    shared += 1
    assert (other.item(), cache.offset.item(), cache.state[2].item(), mine.item()) == (3, 3, 3, 43)


def test_updates_read_the_values_of_the_offset_at_the_time_of_the_call() -> None:
    cache = adopted(1)
    cache.offset.__iadd__(3)
    keys, _ = cache.update_and_fetch(*rows(2))
    assert keys[0, 0, :3, 0].tolist() == [1, 2, 0]


@pytest.mark.parametrize("length", [1, 2, 6])
def test_overflow_is_refused_and_nothing_changes(length: int) -> None:
    cache = adopted(1, 2, 3, capacity=3 + length - 1)
    before = content(cache)
    with pytest.raises(CapacityExceeded, match=f"3 tokens held, {length} more"):
        cache.update_and_fetch(*rows(*range(length)))
    assert content(cache) == before
    assert cache.size() == 3


def test_overflow_is_refused_after_the_state_was_set_from_outside() -> None:
    full = adopted(1, 2, 3, 4, capacity=4)
    cache = adopted(7, capacity=4)
    cache.state = full.state
    before = content(cache)
    with pytest.raises(CapacityExceeded):
        cache.update_and_fetch(*rows(5))
    assert content(cache) == before


def test_a_position_outside_the_buffer_cannot_be_set() -> None:
    cache = adopted(1, capacity=4)
    before = content(cache)
    for position in (5, -1, 2**31 - 1):
        with pytest.raises(CapacityExceeded):
            cache.state = [cache.keys, cache.values, mx.array([position], mx.int32)]
    assert content(cache) == before


def test_updates_of_another_form_are_refused_and_nothing_changes() -> None:
    cache = adopted(1, batch=2, dtype=mx.bfloat16)
    before = content(cache)
    good_keys, good_values = rows(2, batch=2, dtype=mx.bfloat16)
    for keys, values in (
        (good_keys[:1], good_values[:1]),  # would be broadcast over the rows
        (good_keys[:, :1], good_values[:, :1]),  # would be broadcast over the heads
        (good_keys[..., :1], good_values),
        (good_keys, good_values[..., :1]),
        (good_keys, rows(2, 3, batch=2, dtype=mx.bfloat16)[1]),
        (good_keys[..., 0], good_values),
    ):
        with pytest.raises(ShapeMismatch):
            cache.update_and_fetch(keys, values)
    assert content(cache) == before
    assert cache.size() == 1


def test_an_update_of_another_dtype_does_not_change_the_buffers_dtype() -> None:
    cache = adopted(1, dtype=mx.bfloat16)
    cache.update_and_fetch(*rows(2, dtype=mx.float32))
    assert (cache.keys.dtype, cache.values.dtype) == (mx.bfloat16, mx.bfloat16)


def test_trim_is_exact_or_refused() -> None:
    cache = adopted(1, 2, 3)
    before = content(cache)
    assert [cache.trim(n) for n in (4, -1, 0)] == [0, 0, 0]
    assert content(cache) == before
    assert cache.trim(3) == 3
    assert (cache.size(), cache.empty(), cache.offset.item()) == (0, True, 0)
    cache.update_and_fetch(*rows(9))
    assert cache.keys[0, 0, :3, 0].tolist() == [9, 2, 3]
    assert cache.make_mask(1)[0, 0, 0].tolist() == [True, True, *[False] * 6]


def test_copies_are_independent_both_ways() -> None:
    cache = adopted(1, 2)
    twin = cache.copy()
    cache.update_and_fetch(*rows(3))
    twin.update_and_fetch(*rows(4, 5))
    assert cache.keys[0, 0, :4, 0].tolist() == [1, 2, 3, 0]
    assert twin.keys[0, 0, :4, 0].tolist() == [1, 2, 4, 5]
    assert (cache.size(), twin.size()) == (3, 4)


def test_a_write_in_place_stays_in_its_copy() -> None:
    """Some models write into `cache.keys` themselves."""
    cache = adopted(1, 2)
    before, twin = content(cache), cache.copy()
    twin.keys[..., 0, :] = 7.0
    twin.values *= 2
    twin.state[2].__iadd__(1)
    assert content(cache) == before


def test_a_copy_of_a_full_cache_is_full() -> None:
    twin = adopted(1, 2, capacity=2).copy()
    with pytest.raises(CapacityExceeded):
        twin.update_and_fetch(*rows(3))


def test_native_round_trip_is_exact() -> None:
    cache = adopted(1, 2, 3, batch=2)
    native = cache.to_native()
    assert type(native) is KVCache
    assert (native.offset, native.keys.shape[2]) == (3, 3)
    native.update_and_fetch(*rows(4, batch=2))
    again = FixedCapacityKVCache.adopt(native, 8)
    cache.update_and_fetch(*rows(4, batch=2))
    assert content(again) == content(cache)


def test_an_emptied_cache_becomes_an_empty_native_one() -> None:
    cache = adopted(1)
    cache.trim(1)
    native = cache.to_native()
    assert (native.keys, native.offset, native.empty()) == (None, 0, True)


def test_refused_adoptions() -> None:
    with pytest.raises(HostState, match="RotatingKVCache"):
        FixedCapacityKVCache.adopt(RotatingKVCache(max_size=4), 8)
    with pytest.raises(CapacityExceeded, match="more tokens than the capacity"):
        adopted(1, 2, 3, capacity=2)
    with pytest.raises(CapacityExceeded):
        adopted(1, capacity=0)


def test_a_cache_never_written_has_no_state_and_cannot_be_written() -> None:
    """Some models make a cache for every layer and use none in some of them."""
    cache = FixedCapacityKVCache.adopt(KVCache(), 8)
    assert (cache.state, cache.slots, cache.count(), cache.empty(), cache.nbytes) == ([], 0, None, True, 0)
    assert (cache.trim(3), cache.copy().with_state([]).state, cache.to_native().keys) == (3, [], None)
    with pytest.raises(HostState, match="left unwritten is written in decode"):
        cache.update_and_fetch(*rows(1))
    assert cache.state == []


def test_rows_of_different_length_become_no_native_cache() -> None:
    """mlx-lm's plain cache would take the padding for tokens."""
    cache = FixedCapacityKVCache.merge([prefilled(1, 2), prefilled(3)], 8)
    with pytest.raises(HostState, match="rows of different length"):
        cache.to_native()


def test_only_rows_of_one_batch_are_merged() -> None:
    for others in ([prefilled(1), KVCache()], [KVCache(), prefilled(1)], [prefilled(1, batch=2)]):
        with pytest.raises(ShapeMismatch, match="not rows of one batch"):
            FixedCapacityKVCache.merge(others, 8)


def test_states_of_a_ragged_batch_are_checked() -> None:
    cache = FixedCapacityKVCache.merge([prefilled(1, 2), prefilled(3)], 4)
    keys, values, position, time = cache.state
    assert (position.tolist(), time.tolist()) == ([2, 1], [2])
    integers = lambda *values: mx.array(values, mx.int32)  # noqa: E731
    for wrong in ((integers(2), time), (position, position), (position, mx.array([2.0])), (position,)):
        with pytest.raises(ShapeMismatch):
            cache.with_state([keys, values, *wrong])
    for wrong in ((integers(3, 1), time), (integers(-1, 1), time), (position, integers(5))):
        with pytest.raises(CapacityExceeded):
            cache.state = [keys, values, *wrong]
    assert cache.count() == 2
    cache.state = [keys, values, integers(0, 1), integers(1)]
    assert (cache.count(), cache.offset.tolist()) == (1, [0, 1])


def test_constructor_and_state_refuse_other_layouts() -> None:
    keys, values = rows(1, 2)
    position = mx.array([0], mx.int32)
    for wrong in (
        (keys[0], values, position),
        (keys[:, :, :1], values, position),
        (keys, values, mx.array(0, mx.int32)),
        (keys, values, mx.array([0], mx.int64)),
        (keys, values, mx.array([0, 0], mx.int32)),
    ):
        with pytest.raises(ShapeMismatch):
            FixedCapacityKVCache(*wrong)
    with pytest.raises(ShapeMismatch, match="slots"):
        FixedCapacityKVCache(keys, values, position, 9)  # it would be written past its end
    for wrong in ((keys, values), (keys[0], values[0]), (keys[..., :1], values), (keys, values[:, :1])):
        with pytest.raises(ShapeMismatch, match="another capacity"):
            adopted(1, capacity=2 + (wrong[0] is keys and wrong[1] is values)).with_state([*wrong, position])
    for count in (0, 2, 4):
        with pytest.raises(ShapeMismatch, match="number of arrays"):
            adopted(1, capacity=2).with_state([keys, values, position, position][:count])


def test_it_looks_to_mlx_lm_like_a_cache_that_is_there() -> None:
    cache = adopted(1, capacity=4)
    # mlx-lm asks `if cache`, and takes the quantized attention where there is a `bits`.
    assert bool(cache)
    assert not hasattr(cache, "__len__")
    assert not hasattr(cache, "bits")
    mask = create_attention_mask(mx.zeros((1, 1, 4)), cache, return_array=False)
    assert isinstance(mask, mx.array)
    assert (mask.shape, mask.dtype) == ((1, 1, 1, 4), mx.bool_)
    cache.keys = mx.ones_like(cache.keys)
    cache.values = mx.ones_like(cache.values)
    assert float(cache.state[0].min()) == float(cache.keys_and_values()[1].min()) == 1.0


@pytest.mark.parametrize("window", [None, 1, 2, 3, 100])
@pytest.mark.parametrize("length", [1, 3])
def test_mask_shows_the_window_and_nothing_unwritten(window: int | None, length: int) -> None:
    cache = adopted(*range(4), capacity=9)
    mask = cache.make_mask(length, window_size=window)
    assert (mask.shape, mask.dtype) == ((1, 1, length, 9), mx.bool_)
    for row in range(length):
        query = 4 + row
        first = 0 if window is None else max(0, query - window + 1)
        wanted = list(range(first, query + 1))
        assert [slot for slot, seen in enumerate(mask[0, 0, row].tolist()) if seen] == wanted


@pytest.mark.parametrize("window", [3, 8, 100])
def test_the_mask_of_a_window_is_computed_alike_whatever_the_capacity(window: int) -> None:
    """Otherwise two capacities would give two graphs, as if one of them depended on the position."""

    def primitives(capacity: int) -> list[str]:
        found: list[str] = []
        cache = adopted(1, 2, 3, capacity=capacity)
        mx.export_function(
            lambda event: found.extend([event["name"]] if event["type"] == "primitive" else []),
            lambda position: FixedCapacityKVCache(cache.keys, cache.values, position).make_mask(
                1, window_size=window
            ),
            mx.array([3], mx.int32),
        )
        return found

    assert primitives(8) == primitives(64)
