"""Prefill through the cache: a warm run feeds the chunks of a cold one, so it is equal to it in every bit."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_audit.errors import ShapeMismatch
from mlx_audit.prefix import EntryKind, Policy, PrefixRefused, Reason
from mlx_audit.prefix import prefill as module
from mlx_audit.prefix.grid import common_stop, run_start, stops_of, until
from mlx_audit.prefix.snapshot_compare import differences
from prefix.caching import assert_equal, bytes_held, cache_of, cold_run
from prefix_models import CHUNK, SUFFIXES, WINDOW, often, subject, text

T = text(100)
U = text(60, 5)


def kinds(cache: Any) -> dict[int, str]:
    """Return the kind of each entry by the length of its key."""
    return {len(key): entry.kind.value for key, entry in cache.index.items()}


def test_a_warm_run_is_equal_to_a_cold_one_in_every_bit(family: str) -> None:
    cache = cache_of(family)
    cache.prefill(T[:45])
    for query in (T[:45], T[:60], T[:43] + U[:9], T[:8] + U, T[:20], T[:9]):
        warm, cold = cache.prefill(query), cache_of(family).prefill(query)
        assert warm.plan.prefix > 0
        assert cold.plan.prefix == 0
        assert_equal(warm, cold, len(query))


def test_a_cold_run_is_one_of_plain_mlx_lm_on_the_same_chunks(family: str) -> None:
    cache = cache_of(family)
    found = cache.prefill(T[:45], stops=[20])
    ends = cache.stops(T[:45], named=[20])
    assert ends == (8, 16, 20, 24, 32, 40, 44)
    wanted = cold_run(family, T[:44], ends)
    logits = subject(family)(mx.array([T[44:45]]), cache=wanted.caches)[:, -1]
    assert mx.array_equal(found.logits, logits)
    assert differences(found.caches, wanted.caches, 45) == []


@pytest.mark.parametrize("family", often("llama", "gemma3_text", "qwen3_next"))
def test_every_suffix_length_after_a_named_stop(family: str) -> None:
    prompt = 37
    cache = cache_of(family)
    cache.prefill(T[:prompt] + U[:5], stops=[prompt])
    for suffix in sorted(set(SUFFIXES)):
        query = T[:prompt] + [suffix, *text(suffix, 9)][:suffix]
        warm = cache.prefill(query, stops=[prompt])
        assert warm.plan.prefix == prompt, suffix
        cache.clear()
        assert_equal(warm, cache.prefill(query, stops=[prompt]), len(query))


def test_another_grid_is_not_taken_up_while_exact(family: str) -> None:
    cache = cache_of(family)
    cache.insert(T[:30], cold_run(family, T[:30]).caches, position=30)  # nobody knows its chunks
    plan = cache.plan(T[:40], stops=cache.stops(T[:40]))
    assert (plan.prefix, plan.reason) == (0, Reason.OFF_GRID)
    assert cache.plan(T[:40]).prefix == 30
    cache.insert(T[:32], cold_run(family, T[:32], (8, 16, 24)).caches, position=32, stops=(8, 16, 24, 32))
    assert cache.plan(T[:40], stops=cache.stops(T[:40])).prefix == 32
    assert cache.plan(T[:40], stops=cache.stops(T[:40], named=[20])).prefix == (
        16 if family == "llama" else 0
    )
    loose = cache_of(family, exact=False)
    loose.insert(T[:30], cold_run(family, T[:30]).caches, position=30)
    assert loose.prefill(T[:40]).plan.prefix == 30


def test_a_grid_that_is_not_known_does_not_become_known(family: str) -> None:
    cache = cache_of(family, exact=False)
    cache.insert(T[:30], cold_run(family, T[:30]).caches, position=30)
    cache.prefill(T[:45])
    stops = {len(key): entry.payload.stops for key, entry in cache.index.items()}
    assert stops[44] is None
    fresh = cache_of(family)
    fresh.prefill(T[:45])
    fresh.prefill(T[:45] + U[:9])
    for key, entry in fresh.index.items():
        assert entry.payload.stops == (*(end for end in range(8, len(key), 8)), len(key))


def test_an_entry_whose_grid_is_not_known_does_not_replace_one_whose_grid_is() -> None:
    cache = cache_of("llama")
    cache.prefill(T[:45])
    cache.insert(T[:50], cold_run("llama", T[:50]).caches)
    assert kinds(cache) == {44: "prompt", 50: "prompt"}
    cache.prefill(T[:60])
    assert kinds(cache) == {59: "prompt"}


def test_attention_needs_one_snapshot_and_the_others_one_at_each_chunk(family: str) -> None:
    cache = cache_of(family)
    cache.prefill(T[:45], stops=[20])
    wanted = dict.fromkeys((8, 16, 24, 32, 40), "checkpoint") | {20: "prompt", 44: "prompt"}
    assert kinds(cache) == ({44: "prompt"} if family == "llama" else wanted)


@pytest.mark.parametrize(("family", "length"), [("gemma3_text", WINDOW), ("llama4", CHUNK)])
def test_a_window_that_is_not_full_can_be_cut(family: str, length: int) -> None:
    cache = cache_of(family, chunk=4)
    cache.prefill(T[: length + 1])
    assert kinds(cache) == {length: "prompt"}
    cache.prefill(T[: length + 2])
    assert len(cache) > 1


@pytest.mark.parametrize("share", [0, 1, 2, 5, 100])
def test_checkpoints_keep_to_a_budget_that_is_known_before(
    family: str, share: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    budget = 1 + share * cache_of(family)._prefill.costs().at(89, last=8)
    cache = cache_of(family, checkpoint_bytes=budget)
    promised: list[int] = []
    real = module.Prefill._kept

    def watched(self: Any, *arguments: Any) -> Any:
        kept = real(self, *arguments)
        promised.append(sum(self.costs().at(end, last=8) for end in kept))
        return kept

    monkeypatch.setattr(module.Prefill, "_kept", watched)
    cache.prefill(T[:90])
    assert cache.nbytes == bytes_held(cache.index) <= promised[0]
    if family != "llama":
        assert promised[0] <= budget
        assert len(cache) <= 8
        assert (len(cache) > 0) == (share > 0)
        if share:
            assert 89 in kinds(cache)


def test_a_snapshot_costs_what_was_said(family: str) -> None:
    cache = cache_of(family, checkpoints=100)
    costs = cache._prefill.costs()
    cache.prefill(T[:90])
    for key, entry in cache.index.items():
        exact = costs.at(len(key), last=(len(key) - 1) % 8 + 1)
        assert entry.nbytes == exact if family != "llama4" else entry.nbytes <= costs.at(len(key), last=8)


def test_what_progress_raises_cancels_and_leaves_sound_snapshots(family: str) -> None:
    cache = cache_of(family)

    def give_up(done: int, count: int) -> None:
        assert count == 45
        if done == 24:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cache.prefill(T[:45], progress=give_up)
    stats = cache.stats()
    assert (stats.leases, stats.failures) == (0, {"KeyboardInterrupt": 1})
    again = cache.prefill(T[:45])
    assert again.plan.prefix == (0 if family == "llama" else 24)
    assert_equal(again, cache_of(family).prefill(T[:45]), 45)


def test_progress_tells_each_chunk() -> None:
    told: list[tuple[int, int]] = []
    cache = cache_of("llama")
    cache.prefill(T[:20], progress=lambda *step: told.append(step))
    cache.prefill(T[:20], progress=lambda *step: told.append(step))
    assert told == [(8, 20), (16, 20), (19, 20), (20, 20), (20, 20)]


def test_a_forward_that_keeps_state_on_the_model_leaves_no_snapshot(monkeypatch: pytest.MonkeyPatch) -> None:
    model = subject("llama")
    real = type(model).__call__

    def counting(self: Any, *arguments: Any, **named: Any) -> Any:
        self.seen = getattr(self, "seen", 0) + 1
        return real(self, *arguments, **named)

    cache = cache_of("llama")
    cache._prefill.costs()
    monkeypatch.setattr(type(model), "__call__", counting)
    try:
        cache.prefill(T[:20])
    finally:
        model.pop("seen", None) if isinstance(model, dict) and "seen" in model else vars(model).pop(
            "seen", None
        )
    assert len(cache) == 0
    assert cache.stats().not_inserted == {"unknown-class": 1}


def test_the_kinds_of_a_prefill_go_in_their_order() -> None:
    cache = cache_of("mamba2", max_entries=2)
    cache.prefill(T[:45])
    assert kinds(cache)[44] == EntryKind.PROMPT


def test_one_token_is_a_prompt(family: str) -> None:
    cache = cache_of(family)
    first, again = cache.prefill(T[:1]), cache.prefill(T[:1])
    assert_equal(again, first, 1)
    assert (len(cache), again.plan.prefix) == (0, 0)


@pytest.mark.parametrize("stops", [[0], [-1], [True], [1.5], ["x"]])
def test_a_stop_that_is_no_position_is_named(stops: list[Any]) -> None:
    with pytest.raises(ShapeMismatch, match="stops"):
        cache_of("llama").prefill(T[:20], stops=stops)


def test_placeholders_are_not_read_as_text() -> None:
    cache = cache_of("llama", placeholders={T[3]})
    with pytest.raises(PrefixRefused, match="placeholders"):
        cache.prefill(T[:10])


@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=40),
    st.integers(1, 9),
    st.lists(st.integers(1, 45), max_size=3),
    st.sampled_from(list(Policy)),
)
@settings(max_examples=100)
def test_stops_are_the_grid_and_never_inside_a_picture(
    tokens: list[int], chunk: int, named: list[int], policy: Policy
) -> None:
    stops = stops_of(tokens, chunk, policy, named, {3})
    assert list(stops) == sorted(set(stops))
    assert all(0 < stop < len(tokens) for stop in stops)
    assert not any(tokens[stop - 1] == tokens[stop] == 3 for stop in stops)
    plain = stops_of(tokens, chunk, policy, named)
    assert set(plain) - set(stops) == {stop for stop in plain if tokens[stop - 1] == 3 and tokens[stop] == 3}
    boundary = len(tokens) - (1 if policy is Policy.BOUNDARY else 16)
    assert boundary < 1 or boundary in plain
    for stop in range(len(tokens)):
        start = run_start(tokens, stop, {3})
        assert start <= stop
        assert all(token == 3 for token in tokens[start:stop])


@pytest.mark.parametrize(
    ("own", "wanted", "most", "last"),
    [
        ((8, 16, 20), (8, 16, 24), 40, 16),
        ((8, 16, 24), (8, 16, 24), 23, 16),
        ((8, 12, 16), (8, 16, 24), 40, 8),
        ((4, 8), (8, 16), 40, 0),
        ((), (8,), 40, 0),
    ],
)
def test_two_grids_agree_up_to_their_last_common_stop(
    own: tuple[int, ...], wanted: tuple[int, ...], most: int, last: int
) -> None:
    assert common_stop(own, wanted, most) == last
    assert until(own, last) == (tuple(stop for stop in own if stop <= last) if last else None)
