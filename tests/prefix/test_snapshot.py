"""A restored stack goes on exactly as a cold run does: every leaf, every logit, through memory and through a file."""

from __future__ import annotations

from pathlib import Path
from threading import Thread
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import (
    ArraysCache,
    BatchKVCache,
    CacheList,
    ConcatenateKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
)

from mlx_audit.prefix.layers import copied
from mlx_audit.prefix.reasons import PrefixRefused, Reason
from mlx_audit.prefix.snapshot import Snapshot, cost
from mlx_audit.prefix.snapshot_compare import differences
from mlx_audit.prefix.store import load, save
from prefix_models import SUFFIXES, WORLD, Run, often, prefilled, subject, text

PREFILLED, DECODED = 40, 20


def take(run: Run) -> Snapshot:
    return Snapshot.take(run.caches, run.position)


def address(array: mx.array) -> int:
    """Return where an array's bytes begin; on the CPU numpy reads them in place."""
    mx.eval(array)
    return int(np.array(array, copy=False).__array_interface__["data"][0])


@pytest.mark.parametrize("decoded", [0, DECODED], ids=["prefill", "decode"])
def test_goes_on_as_a_cold_run_through_memory_and_through_a_file(
    family: str, decoded: int, tmp_path: Path
) -> None:
    cold = prefilled(family, PREFILLED, decoded)
    position, tokens = cold.position, text(100)
    snapshot = take(cold)
    save(tmp_path, [(tokens[:position], snapshot)], WORLD)
    [entry] = load(tmp_path, WORLD)
    read = entry.snapshot()
    assert read.digest() == snapshot.digest()
    for suffix in sorted(set(SUFFIXES)):
        chunk = tokens[position : position + suffix]
        wanted = cold.twin()
        logits = wanted.feed(chunk)
        for source in (snapshot, read):
            run = Run(cold.model, source.restore(), position)
            assert differences(run.caches, cold.caches, position) == []
            assert run.feed(chunk) == logits, f"logits at suffix {suffix}"
            assert differences(run.caches, wanted.caches, run.position) == [], f"state at suffix {suffix}"


@pytest.mark.parametrize("family", often("gemma3_text", "qwen3_next", "llama4"))
def test_a_restored_run_decodes_the_same_tokens_for_long(family: str) -> None:
    cold, tokens = prefilled(family, 14), text(40)
    run = Run(cold.model, take(cold).restore(), 14)
    for token in tokens[14:]:
        assert run.feed([token]) == cold.feed([token])
    assert differences(run.caches, cold.caches, 40) == []


def test_live_decode_leaves_the_snapshot_alone_and_shares_no_memory_with_it(family: str) -> None:
    live = prefilled(family, 21, 3)
    snapshot = take(live)
    before = snapshot.digest()
    own = {address(array) for array in snapshot.arrays.values()}
    assert len(own) == len(snapshot.leaves)
    assert not own & {address(array) for array in arrays_of(live.caches)}
    for array in arrays_of(live.caches):
        array[...] = 7
    live.feed_all([text(9, seed=2), [5], [6]])
    assert snapshot.digest() == before


def test_who_borrows_a_snapshot_can_change_neither_it_nor_another_borrower(family: str) -> None:
    live = prefilled(family, 24)
    snapshot = take(live)
    before = snapshot.digest()
    first, second = snapshot.restore(), snapshot.restore()
    for array in arrays_of(first):
        array[...] = 7
        mx.eval(array)
    for cache in first:
        spoil_containers(cache)
    Run(live.model, snapshot.restore(), 24).feed_all([text(5, seed=3), *([token] for token in text(10))])
    assert snapshot.digest() == before
    assert differences(second, live.caches, 24) == []
    assert differences(snapshot.restore(), live.caches, 24) == []


def test_arrays_handed_out_for_reading_are_handles_of_their_own() -> None:
    snapshot = take(prefilled("llama", 10))
    before = snapshot.digest()
    for array in snapshot.arrays.values():
        array[...] = 7
    assert snapshot.digest() == before


def test_a_repeat_after_another_request_borrowed_the_prefix_is_equal_to_its_first_run() -> None:
    tokens, other = text(60), text(60, seed=9)
    model = subject("llama")
    first = Run(model).feed_all([tokens[:40]])
    entry = take(first)
    stored = entry.digest()
    answer = [first.feed([token]) for token in tokens[40:50]]
    borrower = Run(model, entry.restore(24), 24)
    borrower.feed_all([other[:12], *([token] for token in other[12:22])])
    repeat = Run(model, entry.restore(), 40)
    assert [repeat.feed([token]) for token in tokens[40:50]] == answer
    assert entry.digest() == stored


def test_bytes_are_known_before_and_hold_no_padding(family: str) -> None:
    live = prefilled(family, PREFILLED)
    known = cost(live.caches, PREFILLED)
    snapshot = take(live)
    assert known == snapshot.nbytes == sum(nbytes for _, nbytes in snapshot.leaves)
    assert known == sum(array.nbytes for array in snapshot.arrays.values())
    padded = sum(cache.nbytes for cache in live.caches)
    assert known < padded or family == "mamba2", "256-row buffers, and rows outside the window, are not kept"


def test_another_thread_can_use_what_one_thread_restored() -> None:
    live, cold = prefilled("llama", 20), prefilled("llama", 15)
    snapshot = take(live)
    with mx.stream(mx.new_thread_local_stream(mx.default_device())):  # as mlx-lm's server does
        restored = snapshot.restore(15)
    wanted: bytes = cold.feed([3, 4])
    found: list[bytes] = []
    worker = Thread(target=lambda: found.append(Run(live.model, restored, 15).feed([3, 4])))
    worker.start()
    worker.join()
    assert found == [wanted]


@pytest.mark.parametrize("values", [[-0.0, float("nan"), float("inf")], [True, False], [1, 2]])
def test_a_copy_has_the_same_bits_in_another_buffer(values: list[Any]) -> None:
    for array in (mx.array(values), mx.array(values)[0]):
        copy = copied(array)
        assert (copy.shape, copy.dtype) == (array.shape, array.dtype)
        assert np.array(copy).tobytes() == np.array(array).tobytes()
        assert address(copy) != address(array)


class Subclass(KVCache):
    """As good as its parent, but nobody knows."""


def filled(cache: Any, rows: int = 1, length: int = 5) -> Any:
    keys = mx.random.normal((rows, 2, length, 32))
    cache.update_and_fetch(keys, keys + 1)
    return cache


def marked() -> Any:
    cache = filled(KVCache())
    cache.rope_deltas = mx.array([3])
    return cache


def arrays(*values: Any, **marks: Any) -> Any:
    cache = ArraysCache(len(values))
    cache.cache = list(values)
    for name, value in marks.items():
        setattr(cache, name, value)
    return cache


ONE = mx.ones((1, 3))


@pytest.mark.parametrize(
    ("make", "reason", "told"),
    [
        (lambda: filled(Subclass()), Reason.UNKNOWN_CLASS, "Subclass"),
        (lambda: CacheList(filled(KVCache()), filled(Subclass())), Reason.UNKNOWN_CLASS, "layer 0 part 1"),
        (marked, Reason.UNKNOWN_CLASS, "rope_deltas"),
        (dict, Reason.UNKNOWN_CLASS, "builtins.dict"),
        (lambda: arrays(ONE, (ONE, ONE)), Reason.UNKNOWN_CLASS, "tuple"),
        (lambda: filled(KVCache(), rows=2), Reason.BATCHED, "one row"),
        (lambda: CacheList(arrays(mx.ones((2, 3)))), Reason.BATCHED, "layer 0 part 0"),
        (lambda: filled(BatchKVCache([0, 1]), rows=2), Reason.BATCHED, "BatchKVCache"),
        (lambda: arrays(ONE, lengths=mx.array([5])), Reason.BATCHED, "lengths"),
        (lambda: arrays(ONE, left_padding=mx.array([1])), Reason.BATCHED, "left_padding"),
        (lambda: filled(KVCache(), length=6), Reason.POSITION_MISMATCH, "found: 6; allowed: 5"),
        (lambda: CacheList(filled(KVCache(), length=4)), Reason.POSITION_MISMATCH, "found: 4; allowed: 5"),
        (KVCache, Reason.POSITION_MISMATCH, "empty"),
        (lambda: arrays(None, None), Reason.POSITION_MISMATCH, "empty"),
        (CacheList, Reason.POSITION_MISMATCH, "parts"),
    ],
)
def test_refuses_what_it_cannot_prove_sound(make: Any, reason: Reason, told: str) -> None:
    with pytest.raises(PrefixRefused) as caught:
        Snapshot.take([make()], 5)
    assert caught.value.reason is reason
    assert str(caught.value).startswith("layer 0")
    assert told in str(caught.value)


def test_refuses_an_empty_prefix_and_an_empty_stack() -> None:
    with pytest.raises(PrefixRefused) as caught:
        Snapshot.take([filled(KVCache())], 0)
    assert caught.value.reason is Reason.BELOW_MINIMUM
    with pytest.raises(PrefixRefused) as caught:
        Snapshot.take([], 5)
    assert caught.value.reason is Reason.POSITION_MISMATCH


def test_a_state_of_24_tokens_is_not_stored_under_16() -> None:
    live = prefilled("qwen3_next", 24)
    with pytest.raises(PrefixRefused) as caught:
        Snapshot.take(live.caches, 16)
    assert caught.value.reason is Reason.POSITION_MISMATCH
    assert "layer 3" in str(caught.value), "attention counts"
    alone = Snapshot.take(live.caches[:3], 24)
    assert {layer.position for layer in alone.layers} == {24}
    with pytest.raises(PrefixRefused) as caught:
        Snapshot(16, alone.layers, list(alone.arrays.values()))
    assert caught.value.reason is Reason.POSITION_MISMATCH, (
        "recurrences don't count; the snapshot does for them"
    )


def test_a_concatenating_cache_is_really_cut() -> None:
    cache, rows = filled(ConcatenateKVCache()), mx.ones((1, 2, 1, 32))
    wanted = cache.keys[..., :2, :]
    [cut] = Snapshot.take([cache], 5).restore(2)
    keys, _ = cut.update_and_fetch(rows, rows)
    assert cut.offset == 3 == keys.shape[2]
    assert mx.array_equal(keys[..., :2, :], wanted)
    cache.trim(3)
    cache.update_and_fetch(rows, rows)
    assert cache.offset == 6, "mlx-lm's own trim brings rows back"


def test_a_forced_trim_of_a_ring_that_holds_too_many_rows_cannot_pass_for_a_sound_one() -> None:
    ring = filled(RotatingKVCache(16), length=40)
    ring.update_and_fetch(mx.ones((1, 2, 3, 32)), mx.ones((1, 2, 3, 32)))
    ring.trim(4)
    with pytest.raises(PrefixRefused, match="cursor") as caught:
        Snapshot.take([ring], 39)
    assert caught.value.reason is Reason.POSITION_MISMATCH


def test_quantized_caches_are_cut_exactly() -> None:
    tokens = mx.random.normal((1, 2, 9, 32))
    long, short = QuantizedKVCache(32, 8), QuantizedKVCache(32, 8)
    long.update_and_fetch(tokens, tokens)
    short.update_and_fetch(tokens[..., :4, :], tokens[..., :4, :])
    assert differences(Snapshot.take([long], 9).restore(4), [short], 4) == []


def arrays_of(caches: Any) -> list[mx.array]:
    """Return the very array objects that live caches hold."""
    found = []
    for cache in caches:
        if isinstance(cache, CacheList):
            found += arrays_of(cache.caches)
        elif isinstance(cache, ArraysCache):
            found += [array for array in cache.cache if array is not None]
        else:
            found += [cache.keys, cache.values]
    return found


def spoil_containers(cache: Any) -> None:
    """Write into the lists of a cache, and move its counters."""
    if isinstance(cache, CacheList):
        for part in cache.caches:
            spoil_containers(part)
    elif isinstance(cache, ArraysCache):
        cache.cache[:] = [None] * len(cache.cache)
    else:
        cache.offset += 5
