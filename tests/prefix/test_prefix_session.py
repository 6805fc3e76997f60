"""A compiled session that restored its prompt is, bit by bit, one that read it."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from kind_models import kind_subject
from mlx_audit.errors import CapacityExceeded, SessionMisuse
from mlx_audit.models.build import build_tiny, resolve_arguments
from mlx_audit.prefix import CachedSession, PrefixCache
from mlx_audit.prefix.rules import RULES
from prefix.caching import BUDGET, cache_of, digests
from prefix_models import MODELS, subject, text
from tiny_models import raw, state_bytes

T = [token % 64 for token in text(100)]  # the vocabulary of the smallest model
U = [token % 64 for token in text(60, 5)]
CAPACITY = 80


def session(cache: PrefixCache, rows: int = 1, **options: Any) -> CachedSession:
    return CachedSession(cache.model, CAPACITY, rows, prefix_cache=cache, evidence="ignore", **options)


@functools.cache
def model_of(family: str) -> Any:
    """Return a model that a session can serve: mlx-lm's llama4 can't be compiled, llama with its caches can."""
    if family != "llama4":
        return subject(family)
    chunked = kind_subject("chunked")
    return build_tiny(chunked.module, resolve_arguments(chunked.module, chunked.config), seed=0)


@pytest.mark.parametrize("family", MODELS)
def test_compiled_steps_after_a_restore_are_those_after_a_cold_prefill(family: str) -> None:
    warm_cache, cold_cache = (PrefixCache(model_of(family), BUDGET, chunk=8) for _ in range(2))
    shared = 40
    warm_cache.prefill(T[:shared] + U[:5])
    prompt = T[:shared] + U[20:31]
    warm, cold = session(warm_cache), session(cold_cache)
    logits, wanted = warm.prefill([prompt]), cold.prefill([prompt])
    stats = warm_cache.stats()
    assert (stats.hits, stats.cached_tokens) == (1, shared)
    before = digests(warm_cache.index)
    assert raw(logits) == raw(wanted)
    assert state_bytes(warm) == state_bytes(cold)
    for token in U[31:45]:
        assert raw(warm.step([token])) == raw(cold.step([token]))
        assert state_bytes(warm) == state_bytes(cold)
    assert warm.trace_count == cold.trace_count
    assert digests(warm_cache.index) == before


def test_the_families_have_every_kind_that_a_model_makes() -> None:
    found = {
        part.kind
        for family in MODELS
        for layer in cache_of(family)._prefill.costs().layers
        for _, part in layer.walk("layer")
    }
    assert found >= set(RULES) - {"quantized", "concatenated", "composite"}


def test_generate_gives_the_same_text_the_second_time() -> None:
    cache = cache_of("qwen3_next")
    texts = [list(session(cache).generate(T[:45], 12)) for _ in range(3)]
    assert texts[0] == texts[1] == texts[2]
    assert cache.stats().cached_tokens == 88


def test_rows_of_different_length_are_each_looked_up() -> None:
    family = "llama"
    cache = cache_of(family)
    for prompt in (U[:20], T[:30]):
        cache.prefill(prompt)
    rows = [U[:20] + [0] * 10, T[:30]]
    before = cache.stats().cached_tokens
    warm, cold = session(cache, 2), session(cache_of(family), 2)
    assert raw(warm.prefill(rows, lengths=[20, 30])) == raw(cold.prefill(rows, lengths=[20, 30]))
    assert state_bytes(warm) == state_bytes(cold)
    assert cache.stats().cached_tokens - before == 19 + 29


def test_rows_of_one_length_are_read_together_without_the_cache() -> None:
    cache = cache_of("llama")
    session(cache, 2).prefill([T[:20], U[:20]])
    assert (len(cache), cache.stats().input_tokens) == (0, 0)


def test_a_session_has_the_tenant_and_the_stops_that_it_is_given() -> None:
    cache = cache_of("qwen3_next")
    for tenant, cached in (("a", 0), ("b", 0), ("a", 21)):
        before = cache.stats().cached_tokens
        one = session(cache, namespace={"tenant": tenant}, stops=(21,))
        one.prefill([T[:21] + U[cached:30]])
        assert cache.stats().cached_tokens - before == cached


def test_a_cache_of_another_model_is_refused() -> None:
    with pytest.raises(SessionMisuse, match="another model"):
        CachedSession(subject("qwen3_next"), prefix_cache=cache_of("llama"), evidence="ignore")


def test_what_does_not_fit_is_refused_before_anything_is_read() -> None:
    cache = cache_of("llama")
    with pytest.raises(CapacityExceeded):
        session(cache).prefill([T[:100]])
    assert cache.stats().input_tokens == 0
