"""Caches of every kind under random updates: restored at any point, they hand out what the original hands out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    ChunkedKVCache,
    ConcatenateKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
)

from mlx_audit.prefix.layers import kind_for, kinds
from mlx_audit.prefix.reasons import PrefixRefused
from mlx_audit.prefix.rules import RULES, refusal
from mlx_audit.prefix.snapshot import Snapshot, leaf_bytes, read_stack
from mlx_audit.prefix.snapshot_compare import differences

MAKERS: dict[str, Callable[[], Any]] = {
    "linear": KVCache,
    "concatenated": ConcatenateKVCache,
    "quantized": lambda: QuantizedKVCache(32, 4),
    "rotating": lambda: RotatingKVCache(6),
    "rotating that keeps": lambda: RotatingKVCache(6, keep=2),
    "rotating, one row": lambda: RotatingKVCache(2, keep=1),
    "chunked": lambda: ChunkedKVCache(4),
    "composite": lambda: CacheList(RotatingKVCache(5), CacheList(KVCache(), ChunkedKVCache(4))),
}
CHUNKS = st.lists(st.integers(1, 9), min_size=1, max_size=8)


def fed(cache: Any, tokens: list[int]) -> list[bytes]:
    """Feed one chunk whose rows tell which token they are; return the bytes of what attention would read."""
    if isinstance(cache, CacheList):
        return [part for inner in cache.caches for part in fed(inner, tokens)]
    if isinstance(cache, ChunkedKVCache):
        cache.maybe_trim_front()
    rows = mx.broadcast_to(
        mx.reshape(mx.array(tokens, mx.float32), (1, 1, -1, 1)), (1, 2, len(tokens), 32)
    ) + mx.arange(64).reshape(1, 2, 1, 32)
    keys, values = cache.update_and_fetch(rows, -rows)
    flat = [*keys, *values] if isinstance(keys, (tuple, list)) else [keys, values]
    return [leaf_bytes(array) for array in flat]


def chunked(chunks: list[int], start: int = 0) -> list[list[int]]:
    """Return token numbers in chunks of these lengths."""
    found = []
    for length in chunks:
        found.append(list(range(start, start + length)))
        start += length
    return found


@pytest.mark.parametrize("kind", MAKERS)
@settings(max_examples=15, deadline=None)
@given(before=CHUNKS, after=CHUNKS)
def test_a_restored_cache_hands_out_what_the_original_does(
    kind: str, before: list[int], after: list[int]
) -> None:
    cache, position = MAKERS[kind](), sum(before)
    for chunk in chunked(before):
        fed(cache, chunk)
    restored = Snapshot.take([cache], position).restore()
    assert differences(restored, [cache], position) == []
    for chunk in chunked(after, position):
        assert fed(restored[0], chunk) == fed(cache, chunk)
    assert differences(restored, [cache], position + sum(after)) == []


@pytest.mark.parametrize("kind", MAKERS)
@settings(max_examples=25, deadline=None)
@given(before=CHUNKS, after=CHUNKS, data=st.data())
def test_a_cut_is_what_a_run_that_stopped_there_goes_on_as_or_is_refused(
    kind: str, before: list[int], after: list[int], data: st.DataObject
) -> None:
    cache, position = MAKERS[kind](), sum(before)
    for chunk in chunked(before):
        fed(cache, chunk)
    snapshot = Snapshot.take([cache], position)
    prefix = data.draw(st.integers(1, position), label="prefix")
    refused = refusal(snapshot.layers, prefix)
    if refused is not None:
        digest = snapshot.digest()
        with pytest.raises(PrefixRefused) as caught:
            snapshot.restore(prefix)
        assert caught.value.reason is refused.reason
        assert snapshot.digest() == digest
        return
    stopped = MAKERS[kind]()
    for chunk in chunked(before):
        chunk = [token for token in chunk if token < prefix]
        if chunk:
            fed(stopped, chunk)
    [restored] = snapshot.restore(prefix)
    for chunk in chunked(after, prefix):
        assert fed(restored, chunk) == fed(stopped, chunk)
    assert differences([restored], [stopped], prefix + sum(after)) == []


@pytest.mark.parametrize("before", [[9, 1, 1], [1] * 12, [5, 5, 5], [3, 9]], ids=str)
def test_a_chunked_cache_refuses_exactly_the_cuts_that_would_go_on_differently(before: list[int]) -> None:
    """The cut is made past the rule, and told from a run that stopped there."""
    cache, position = ChunkedKVCache(4), sum(before)
    for chunk in chunked(before):
        fed(cache, chunk)
    [layer], arrays = read_stack([cache], position)
    judged = set()
    for prefix in range(layer.parameters["start_position"] + 1, position):
        stopped = ChunkedKVCache(4)
        for chunk in chunked(before):
            if chunk[0] < prefix:
                fed(stopped, [token for token in chunk if token < prefix])
        cut = kinds()["chunked"].make(*kinds()["chunked"].cut(layer, arrays, prefix))
        same = fed(cut, [prefix]) == fed(stopped, [prefix])
        assert same == (refusal([layer], prefix) is None), f"prefix {prefix}"
        judged.add(same)
    assert judged == ({True, False} if before != [3, 9] else {True})


def test_every_kind_is_tried_and_has_a_rule_and_every_native_class_is_judged() -> None:
    import mlx_lm.models.cache as native

    assert set(RULES) == set(kinds())
    assert {kind.native.__name__ for kind in kinds().values()} == {rule.native for rule in RULES.values()}
    assert {*(name.split()[0].strip(",") for name in MAKERS), "arrays"} == set(RULES)
    classes = {
        name
        for name, value in vars(native).items()
        if isinstance(value, type) and issubclass(value, native._BaseCache) and name != "_BaseCache"
    }
    assert classes - {rule.native for rule in RULES.values()} == {"BatchKVCache", "BatchRotatingKVCache"}


def test_every_attribute_of_a_fresh_cache_is_known() -> None:
    made = [*(make() for make in MAKERS.values()), ArraysCache(2)]
    assert {kind_for(cache, "cache").kind for cache in made} == set(RULES)
