"""FixedCapacityArraysCache: arrays of any form, replaced as a whole, that never take a token back."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import ArraysCache, KVCache

from mlx_audit.caches.arrays import FixedCapacityArraysCache
from mlx_audit.errors import HostState, ShapeMismatch
from tiny_models import raw

Cache = FixedCapacityArraysCache


def native(*arrays: mx.array | None) -> ArraysCache:
    cache = ArraysCache(len(arrays))
    cache.cache = list(arrays)
    return cache


def arrays(rows: int = 1, start: int = 0) -> list[mx.array]:
    """Return a convolution's state in half precision, a recurrence in float32, and ids."""
    numbers = mx.arange(start, start + rows * 6)
    return [
        numbers.reshape(rows, 3, 2).astype(mx.bfloat16),
        numbers.reshape(rows, 1, 2, 3).astype(mx.float32) / 7,
        numbers.reshape(rows, 6),
    ]


def test_state_of_any_dtype_and_none_in_between() -> None:
    conv, recurrence, ids = arrays(2)
    cache = Cache.adopt(native(conv, None, recurrence, ids), 9)
    assert [raw(a) for a in cache.state] == [raw(a) for a in (conv, recurrence, ids)]
    assert cache.roles == ["recurrent"] * 3
    assert cache[1] is None
    assert (cache.rows, cache.batch_size, cache.count(), cache.slots, cache.extent) == (2, 2, None, 0, 0)
    assert (cache.empty(), cache.is_trimmable(), cache.lengths, cache.left_padding) == (False,) * 2 + (
        None,
    ) * 2
    assert cache.make_mask(3) is None
    cache.advance(3)
    back = cache.with_state([mx.zeros_like(a) for a in cache.state])
    assert [a is None for a in back.cache] == [False, True, False, False]
    assert float(mx.abs(cache[2]).max()) > 0


def test_a_slot_left_unwritten_cannot_be_written_later() -> None:
    """The state of a step would have one array more than the next takes."""
    cache = Cache.adopt(native(arrays()[0], None), 9)
    cache[0] = arrays()[0] + 1
    with pytest.raises(HostState, match="left unwritten is written in decode"):
        cache[1] = mx.zeros((1, 2))
    assert len(cache.state) == 1
    unwritten = Cache.adopt(ArraysCache(2), 9)
    assert (unwritten.state, unwritten.empty(), unwritten.rows) == ([], True, 1)
    assert unwritten.with_state([]).state == []


def test_nothing_is_shared_with_the_native_cache_or_a_copy() -> None:
    own = arrays()
    before = [raw(a) for a in own]
    source = native(*own)
    cache = Cache.adopt(source, 9)
    target, twin = cache.to_native(), cache.copy()
    for other in (source, target, twin):
        for index in range(3):
            changed = other[index]
            changed += 1  # in place: every holder of this handle sees it
            other[index] = changed
    assert [raw(a) for a in cache.state] == before
    assert type(target) is ArraysCache


def test_trim_is_refused() -> None:
    cache = Cache.adopt(native(*arrays()), 9)
    before = [raw(a) for a in cache.state]
    assert [cache.trim(n) for n in (-1, 0, 1, 9)] == [0] * 4
    assert [raw(a) for a in cache.state] == before


def test_a_state_that_a_short_prompt_left_short_is_padded_in_front() -> None:
    form = Cache.like(native(mx.zeros((1, 4), mx.int32), mx.zeros((1, 3, 2))), 9)
    cache = form.refilled(native(mx.array([[7, 8]]), mx.ones((1, 1, 2))))
    assert cache[0].tolist() == [[0, 0, 7, 8]]
    assert cache[1].tolist() == [[[0, 0], [0, 0], [1, 1]]]
    assert [a.dtype for a in cache.state] == [mx.int32, mx.float32]
    ragged = form.merged([native(mx.array([[i]]), mx.full((1, n, 2), float(i))) for i, n in ((5, 1), (6, 3))])
    assert (ragged.ragged, ragged.rows) == (True, 2)
    assert ragged[0].tolist() == [[0, 0, 0, 5], [0, 0, 0, 6]]
    assert ragged[1][:, :, 0].tolist() == [[0, 0, 5], [6, 6, 6]]


@pytest.mark.parametrize(
    "given",
    [
        (mx.zeros((1, 5), mx.int32), mx.zeros((1, 3, 2))),  # longer than the empty cache's: it grows
        (mx.zeros((1, 4)), mx.zeros((1, 3, 2))),  # another dtype
        (mx.zeros((1, 4), mx.int32), mx.zeros((1, 2, 1))),  # short along two axes
        (mx.zeros((1, 4, 1), mx.int32), mx.zeros((1, 3, 2))),
        (mx.zeros((1, 4), mx.int32), None),
    ],
)
def test_a_state_whose_form_depends_on_the_prompt_is_refused(given: tuple[Any, Any]) -> None:
    form = Cache.like(native(mx.zeros((1, 4), mx.int32), mx.zeros((1, 3, 2))), 9)
    with pytest.raises(ShapeMismatch, match="another form"):
        form.refilled(native(*given))
    none = Cache.like(native(mx.zeros((1, 4), mx.int32), None), 9)
    with pytest.raises(ShapeMismatch, match="another form"):
        none.refilled(native(mx.zeros((1, 4), mx.int32), mx.zeros((1, 3, 2))))


def test_rows_are_merged_in_order_or_refused() -> None:
    rows = [native(*arrays(start=start), None) for start in (0, 50, 90)]
    cache = Cache.merge(rows, 9)
    assert (cache.rows, cache.ragged, cache[3]) == (3, True, None)
    for index, row in enumerate(rows):
        assert [raw(a[index : index + 1]) for a in cache.state] == [raw(a) for a in row.cache[:3]]
    for others in (
        [native(None), native(mx.zeros((1, 2)))],  # would drop the second row's
        [native(mx.zeros((1, 2))), native(None)],
        [native(mx.zeros((2, 2))), native(mx.zeros((1, 2)))],
        [native(mx.zeros((1, 2))), native(mx.zeros((1, 3)))],
        [native(mx.zeros((1, 2))), native(mx.zeros((1, 2), mx.int32))],
    ):
        with pytest.raises(ShapeMismatch, match="another form"):
            Cache.merge(others, 9)


def test_refusals() -> None:
    with pytest.raises(HostState, match="only mlx-lm's ArraysCache"):
        Cache.adopt(KVCache(), 9)
    padded = native(*arrays())
    padded.left_padding = mx.array([0])
    with pytest.raises(HostState, match="still counts the padding"):
        Cache.adopt(padded, 9)
    padded.finalize()
    padded.prepare(lengths=[3])
    with pytest.raises(HostState, match="still counts the padding"):
        Cache.merge([native(*arrays()), padded], 9)
    cache = Cache.adopt(native(*arrays()), 9)
    for count in (0, 2, 4):
        with pytest.raises(ShapeMismatch, match="number of arrays"):
            cache.with_state([mx.zeros((1, 1))] * count)
