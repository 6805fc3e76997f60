"""FixedCapacityQuantizedCache: bit for bit what mlx-lm's own quantized cache holds."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.base import create_attention_mask, scaled_dot_product_attention
from mlx_lm.models.cache import KVCache, QuantizedKVCache

from cache_oracle import GROUP, feed, filled_native, marks, merged, quantized, wanted
from mlx_audit.caches.quantized import FixedCapacityQuantizedCache
from mlx_audit.errors import CapacityExceeded, HostState, ShapeMismatch
from tiny_models import raw


def noise(count: int, seed: int, batch: int = 2) -> tuple[mx.array, mx.array]:
    """Return keys and values `[B, 2, L, 32]` that lose something in few bits."""
    keys, values = mx.random.normal((2, batch, 2, count, GROUP), key=mx.random.key(seed))
    return keys, values


def written(bits: int, *counts: int) -> QuantizedKVCache:
    native = QuantizedKVCache(GROUP, bits)
    for seed, count in enumerate(counts):
        native.update_and_fetch(*noise(count, seed))
    return native


def attended(cache: Any, arrays: tuple[mx.array, mx.array], seed: int) -> mx.array:
    """Return what mlx-lm's attention makes of the next tokens, four query heads on two of the keys."""
    count = arrays[0].shape[2]
    queries = mx.random.normal((2, 4, count, GROUP), key=mx.random.key(seed))
    mask = create_attention_mask(mx.zeros((2, count, 4)), cache, return_array=True)
    keys, values = cache.update_and_fetch(*arrays)
    return scaled_dot_product_attention(queries, keys, values, cache=cache, scale=0.2, mask=mask)


@pytest.mark.parametrize("bits", [4, 8])
def test_every_bit_is_that_of_mlx_lm(bits: int) -> None:
    native = written(bits, 3, 1)
    cache = FixedCapacityQuantizedCache.adopt(native, 12)
    for seed, count in enumerate((1, 4, 1), start=10):
        own, theirs = (attended(c, noise(count, seed), seed) for c in (cache, native))
        assert float(mx.abs(own - theirs).max()) < 1e-5
    held = native.offset
    parts = [*native.keys, *native.values]
    assert [raw(a[:, :, :held]) for a in cache.state[:6]] == [raw(a[:, :, :held]) for a in parts]
    assert [array.dtype for array in cache.state[:3]] == [mx.uint32, mx.float32, mx.float32]
    assert (cache.bits, cache.group_size, cache.count()) == (bits, GROUP, 10)
    assert [raw(a) for a in FixedCapacityQuantizedCache.adopt(cache.to_native(), 12).state] == [
        raw(a) for a in cache.state
    ]


@pytest.mark.parametrize("bits", [4, 8])
def test_a_row_of_a_ragged_batch_attends_as_it_does_alone(bits: int) -> None:
    natives = []
    for seed, count in ((0, 2), (1, 5)):
        natives.append(QuantizedKVCache(GROUP, bits))
        natives[-1].update_and_fetch(*noise(count, seed, batch=1))
    cache = FixedCapacityQuantizedCache.merge(natives, 9)
    arrays = noise(1, 7)
    together = attended(cache, arrays, 3)
    queries = mx.random.normal((2, 4, 1, GROUP), key=mx.random.key(3))
    for row, native in enumerate(natives):
        keys, values = native.update_and_fetch(*(array[row : row + 1] for array in arrays))
        alone = scaled_dot_product_attention(
            queries[row : row + 1], keys, values, cache=native, scale=0.2, mask=None
        )
        assert float(mx.abs(together[row : row + 1] - alone).max()) < 1e-5


def test_ragged_rows_each_see_their_own_and_forget_together() -> None:
    kind, rows = quantized(8), [[1, 2, 3], [*range(30, 39)]]
    cache = merged(kind, rows, 4, 20)
    assert (cache.trim(4), cache.trim(3)) == (0, 3)
    rows = [[], [*range(30, 36)]]
    for count in (1, 3):
        new = [[*range(100 + len(rows[0]), 100 + len(rows[0]) + count)], [200 + count] * count]
        seen = feed(cache, kind, new)
        rows = [row + more for row, more in zip(rows, new, strict=True)]
        assert seen == wanted(kind, rows, count)


def test_trim_to_nothing_and_on() -> None:
    kind = quantized(4)
    cache = kind.cls.adopt(filled_native(kind, [[1, 2, 3]], 2), 3)
    assert cache.trim(3) == 3
    assert cache.to_native().keys is None
    assert feed(cache, kind, [[7, 8, 9]]) == wanted(kind, [[7, 8, 9]], 3)
    with pytest.raises(CapacityExceeded):
        feed(cache, kind, [[1]])


def test_refusals_and_an_unwritten_cache() -> None:
    with pytest.raises(HostState, match="only mlx-lm's QuantizedKVCache"):
        FixedCapacityQuantizedCache.adopt(KVCache(), 9)
    cache = FixedCapacityQuantizedCache.adopt(QuantizedKVCache(GROUP, 4), 9)
    assert (cache.state, cache.count(), cache.trim(2), cache.to_native().keys) == ([], None, 2, None)
    with pytest.raises(HostState, match="left unwritten is written in decode"):
        cache.update_and_fetch(*marks([[1]], (GROUP, GROUP)))
    full = FixedCapacityQuantizedCache.adopt(written(4, 3), 4)
    before = [raw(array) for array in full.state]
    keys, values = noise(1, 0)
    wide = mx.concatenate([values, values], axis=-1)
    for wrong in ((keys[:1], values[:1]), (keys[:, :1], values), (wide, values), (keys, wide)):
        with pytest.raises(ShapeMismatch):
            full.update_and_fetch(*wrong)
    with pytest.raises(CapacityExceeded):
        full.update_and_fetch(*noise(2, 0))
    assert [raw(array) for array in full.state] == before
    position = mx.zeros((1,), mx.int32)
    with pytest.raises(ShapeMismatch, match="packed numbers, scales and biases"):
        FixedCapacityQuantizedCache(full.keys[:2], full.values[:2], position, 4, 4, GROUP)
    with pytest.raises(ShapeMismatch, match="slots"):
        FixedCapacityQuantizedCache(full.keys, full.values, position, 9, 4, GROUP)
