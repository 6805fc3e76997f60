"""PrefixCache: what is planned is what is restored, nothing else changes, and every refusal says why."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import KVCache

import mlx_audit
from mlx_audit.errors import ShapeMismatch
from mlx_audit.prefix import EntryKind, PrefixCache, PrefixRefused, Reason
from mlx_audit.prefix.plan import MARGIN
from mlx_audit.prefix.snapshot import Snapshot
from mlx_audit.prefix.snapshot_compare import differences
from prefix.caching import BUDGET, bytes_held, cache_of, cold_run, digests
from prefix_models import Run, prefilled, subject, text

T = text(100)


def filled(family: str, *lengths: int, **options: Any) -> PrefixCache:
    cache = cache_of(family, **options)
    for length in lengths:
        cache.insert(T[:length], prefilled(family, length).caches, position=length)
    return cache


def test_the_public_names_are_there_and_come_lazily() -> None:
    assert mlx_audit.PrefixCache is PrefixCache
    from mlx_audit import prefix

    assert all(getattr(prefix, name) is not None for name in prefix.__all__)
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        _ = prefix.Nothing


def test_what_is_restored_is_what_a_cold_run_has(family: str) -> None:
    cache = filled(family, 20)
    assert len(cache) == 1
    for query in (T[:21], T[:40]):
        plan = cache.plan(query)
        with cache.restore(query) as taken:
            assert taken.plan == plan
            assert (plan.prefix, taken.suffix, taken.refused) == (20, query[20:], ())
            assert differences(taken.caches, prefilled(family, 20).caches, 20) == []
            assert [type(one) for one in taken.caches] == [type(one) for one in cache.fresh()]


def test_a_plan_changes_nothing() -> None:
    cache = filled("qwen3_next", 10, 20, 30)
    before = [list(key) for key, _ in cache.index.items()], cache.index.tree(), cache.stats()
    cache.plan(T[:15])
    cache.plan([5])
    assert ([list(key) for key, _ in cache.index.items()], cache.index.tree(), cache.stats()) == before
    with cache.restore(T[:15]):
        pass
    assert [len(key) for key, _ in cache.index.items()] == [20, 30, 10]


def test_the_next_shorter_boundary_serves_and_says_why_not_a_longer_one() -> None:
    cache = filled("qwen3_next", 10, 30)
    with cache.restore([*T[:25], 96]) as taken:
        assert (taken.plan.prefix, taken.plan.reason) == (10, Reason.RECURRENT_OFF_BOUNDARY)
        assert taken.plan.where == "layer 0 (arrays)"
        assert [(plan.entry, plan.reason) for plan in taken.refused] == [(30, Reason.RECURRENT_OFF_BOUNDARY)]
    assert cache.plan(T[:12]).reason is Reason.RECURRENT_OFF_BOUNDARY
    assert cache.plan([*T[:10], 96, 95]).reason is None
    cold = cache.plan(T[:9])
    assert (cold.prefix, cold.reason) == (0, Reason.RECURRENT_OFF_BOUNDARY)
    assert cache.plan([96, 1]).reason is Reason.MISS


def test_an_entry_that_cannot_be_restored_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = filled("qwen3_next", 10, 20)
    real = Snapshot.restore

    def failing(self: Snapshot, prefix: int | None = None) -> list[Any]:
        if self.position == 20:
            raise PrefixRefused(Reason.POSITION_MISMATCH, where="layer 1")
        return real(self, prefix)

    monkeypatch.setattr(Snapshot, "restore", failing)
    with cache.restore(T[:30]) as taken:
        assert (taken.plan.prefix, taken.plan.reason) == (10, Reason.POSITION_MISMATCH)
        assert cache.stats().leases == 1
    stats = cache.stats()
    assert (stats.hits, stats.leases, stats.shortenings) == (1, 0, {"position-mismatch": 1})


def test_an_entry_that_left_meanwhile_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    from mlx_audit.prefix import cache as module

    cache = filled("qwen3_next", 10, 20)
    real = module.candidates

    def late(index: Any, query: Any) -> Any:
        found = real(index, query)
        index.remove(found[0].entry)
        return found

    monkeypatch.setattr(module, "candidates", late)
    with cache.restore(T[:30]) as taken:
        assert taken.plan.prefix == 10
    with cache.restore(T[:30]) as taken:
        assert (taken.plan.prefix, taken.plan.reason) == (0, Reason.MISS)


def test_a_key_that_the_index_mixed_up_is_not_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = filled("llama", 20)
    monkeypatch.setattr(type(cache.index), "tokens_of", lambda *_: cache._query([5] * 20, None, None).key)
    with cache.restore(T[:30]) as taken:
        assert (taken.plan.prefix, taken.plan.reason) == (0, Reason.KEY_MISMATCH)


@pytest.mark.parametrize(
    ("family", "query", "prefix", "reason"),
    [
        ("llama", 60, 40, None),
        ("llama", 50, 50 - MARGIN, Reason.MARGIN),
        ("llama", 40, 40 - MARGIN, Reason.MARGIN),
        ("llama", 16, 0, Reason.BELOW_MINIMUM),
        ("qwen3_next", 60, 40, None),
        ("qwen3_next", 40 + MARGIN, 40, None),
        ("qwen3_next", 50, 0, Reason.RECURRENT_OFF_BOUNDARY),
        ("qwen3_next", 40, 0, Reason.EXACT_REPLAY_BYPASS),
    ],
)
def test_the_policy_margin(family: str, query: int, prefix: int, reason: Reason | None) -> None:
    cache = filled(family, 40, policy="margin")
    plan = cache.plan(T[:query])
    assert (plan.prefix, plan.suffix, plan.reason) == (prefix, query - prefix, reason)


def test_the_margin_leaves_its_snapshot_where_the_next_request_takes_it_up() -> None:
    cache = cache_of("qwen3_next", policy="margin")
    first = cache.prefill(T[:50])
    again = cache.prefill(T[:50])
    assert (first.plan.prefix, again.plan.prefix) == (0, 50 - MARGIN)
    assert mx.array_equal(first.logits, again.logits)


def test_below_the_minimum_nothing_is_restored() -> None:
    cache = filled("llama", 20, minimum=15)
    assert cache.plan([*T[:14], 96]).reason is Reason.BELOW_MINIMUM
    assert cache.plan([*T[:15], 96]).prefix == 15


def test_a_stack_of_another_model_is_not_stored() -> None:
    cache = cache_of("llama")
    with pytest.raises(PrefixRefused, match="stored for another cache kind") as caught:
        cache.insert(T[:20], prefilled("gemma3_text", 20).caches)
    assert caught.value.reason is Reason.OTHER_FINGERPRINT
    assert (len(cache), cache.stats().not_inserted) == (0, {"other-fingerprint": 1})


def test_an_unknown_class_is_refused_when_the_cache_is_made_and_when_a_stack_is_stored() -> None:
    class Mine(KVCache):
        pass

    with pytest.raises(PrefixRefused, match="unknown-class"):
        PrefixCache(subject("llama"), BUDGET, make_cache=lambda model: [Mine() for _ in model.layers])
    cache, run = cache_of("llama"), prefilled("llama", 20)
    run.caches[1].__class__ = Mine
    with pytest.raises(PrefixRefused, match=r"layer 1: unknown-class"):
        cache.insert(T[:20], run.caches)


def test_an_insert_copies(family: str) -> None:
    cache, run = cache_of(family), prefilled(family, 20)
    cache.insert(T[:20], run.caches, position=20)
    before = digests(cache.index)
    for token in T[20:40]:
        run.feed([token])
    assert digests(cache.index) == before
    with cache.restore(T[:21]) as taken:
        Run(run.model, taken.caches, 20).feed(T[20:40])
    assert digests(cache.index) == before


def test_bytes_are_those_of_the_arrays_after_every_call(family: str) -> None:
    size = filled(family, 30).nbytes
    budget = 3 * size
    cache = cache_of(family, max_bytes=budget, checkpoint_bytes=budget)
    for number in range(12):
        tokens = [number, *T[1 : 8 + 3 * number]]
        if number % 3:
            run = cold_run(family, tokens)
            cache.insert(tokens, run.caches, position=len(tokens), kind="output" if number % 2 else "prompt")
        else:
            cache.prefill(tokens)
        assert cache.nbytes == bytes_held(cache.index) <= budget
        cache.index.check()
    assert cache.stats().evictions > 0
    cache.clear()
    assert (cache.nbytes, len(cache)) == (0, 0)


def test_too_large_and_leased_change_nothing() -> None:
    family, run = "llama", prefilled("llama", 20)
    size = filled(family, 20).nbytes
    tight = cache_of(family, max_bytes=size - 1)
    assert tight.insert(T[:20], run.caches).reason == "too-large"
    cache = cache_of(family, max_bytes=size)
    cache.insert(T[:20], run.caches)
    with cache.restore(T[:21]):
        other = cache.insert([5, *T[1:20]], run.caches)
        assert (other.entry, other.reason) == (None, "leased")
    assert cache.insert([5, *T[1:20]], run.caches).entry is not None
    assert cache.stats().not_inserted == {"leased": 1}


def test_a_lease_ends_however_the_block_ends() -> None:
    cache = filled("llama", 20)
    for error in (ValueError, KeyboardInterrupt, GeneratorExit):
        manager = cache.restore(T[:30])
        manager.__enter__()
        assert cache.stats().leases == 1
        assert not manager.__exit__(error, error(), None)
        assert cache.stats().leases == 0
    assert cache.stats().failures == {"ValueError": 1, "KeyboardInterrupt": 1, "GeneratorExit": 1}


def test_counts_and_log_lines(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "mlx_audit.prefix")
    cache = filled("qwen3_next", 10, 20)
    queries = [T[:30], [96, 95], T[:10], [*T[:15], 96]]
    for query in queries:
        with cache.restore(query):
            pass
    stats = cache.stats()
    assert (stats.hits, stats.misses) == (2, 1)
    assert stats.refusals == {"exact-replay-bypass": 1}
    assert stats.shortenings == {"recurrent-off-boundary": 1}
    assert (stats.input_tokens, stats.cached_tokens) == (58, 30)
    assert (stats.entries, stats.insertions, stats.nbytes) == (2, 2, cache.nbytes)
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == len(queries)
    assert re.fullmatch(
        r"outcome=hit reason=recurrent-off-boundary where=layer_0_\(arrays\) input_tokens=16 cached_tokens=10 "
        rf"lookup_ms=\d+\.\d\d restore_ms=\d+\.\d\d inserted_bytes=0 held_bytes={cache.nbytes}",
        lines[3],
    )
    assert [line.split()[0] for line in lines] == [
        "outcome=hit",
        "outcome=miss",
        "outcome=refused",
        "outcome=hit",
    ]


def test_a_store_keeps_the_order_of_use_and_is_read_when_it_is_wanted(family: str, tmp_path: Path) -> None:
    cache = cache_of(family)
    for start in (1, 2, 3):
        tokens = [start, *T[1:20]]
        cache.insert(tokens, cold_run(family, tokens).caches, position=20)
    with cache.restore([1, *T[1:25]]):
        pass
    assert cache.save(tmp_path) > cache.nbytes
    other = cache_of(family)
    assert other.load(tmp_path) == 3
    assert [next(iter(key)) for key, _ in other.index.items()] == [2, 3, 1]
    assert other.nbytes == cache.nbytes
    assert digests(other.index) == digests(cache.index)
    with other.restore([3, *T[1:25]]) as taken:
        run = Run(subject(family), taken.caches, 20)
        assert run.feed(taken.suffix) == cold_run(family, [3, *T[1:20]]).feed(T[20:25])
    smaller = cache_of(family, max_bytes=2 * cache.nbytes // 3)
    assert smaller.load(tmp_path, verify=True) == 2
    assert [next(iter(key)) for key, _ in smaller.index.items()] == [3, 1]


def test_a_loaded_entry_keeps_its_grid_and_its_kind(family: str, tmp_path: Path) -> None:
    cache = cache_of(family)
    first = cache.prefill(T[:45])
    cache.save(tmp_path)
    other = cache_of(family)
    assert other.load(tmp_path) == len(cache)
    again = other.prefill(T[:45])
    assert again.plan.prefix == 44
    assert mx.array_equal(again.logits, first.logits)
    found, wanted = (
        {tuple(key): (one.kind, one.payload.stops) for key, one in c.index.items()} for c in (other, cache)
    )
    assert found == wanted


@pytest.mark.parametrize("stops", [(), (8,), (8, 21), (8, 8, 20), (12, 8, 20), (0, 20)])
def test_chunks_that_do_not_lead_to_the_end_of_the_key_are_refused(stops: tuple[int, ...]) -> None:
    cache = cache_of("llama")
    with pytest.raises(PrefixRefused, match="chunks do not lead"):
        cache.insert(T[:20], prefilled("llama", 20).caches, stops=stops)


def test_one_folder_holds_one_namespace(tmp_path: Path) -> None:
    cache = cache_of("llama")
    for tenant in ("a", "b"):
        cache.insert(T[:20], prefilled("llama", 20).caches, namespace={"tenant": tenant})
    cache.save(tmp_path, namespace={"tenant": "a"})
    other = cache_of("llama", namespace={"tenant": "a"})
    assert other.load(tmp_path) == 1
    with pytest.raises(PrefixRefused, match="stored for another tenant"):
        cache_of("llama").load(tmp_path)
    assert cache.clear({"tenant": "b"}) == 1
    assert len(cache) == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"policy": "all"}, "boundary, margin"),
        ({"chunk": 0}, "chunk"),
        ({"minimum": 0}, "minimum"),
        ({"minimum": True}, "minimum"),
        ({"checkpoints": -1}, "checkpoints"),
        ({"namespace": {"user": "x"}}, "no such field"),
        ({"max_entries": 0}, "max_entries"),
    ],
)
def test_unusable_settings_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(mlx_audit.errors.MlxAuditError, match=message):
        cache_of("llama", **options)


@pytest.mark.parametrize("tokens", [[], [-1], [1.5], "text"])
def test_unusable_tokens_are_named(tokens: Any) -> None:
    cache = cache_of("llama")
    with pytest.raises(ShapeMismatch), cache.restore(tokens):
        pass
    with pytest.raises(ShapeMismatch):
        cache.plan(tokens)
    assert cache.insert(T[:5], prefilled("llama", 5).caches, kind=EntryKind.OUTPUT).entry is not None
