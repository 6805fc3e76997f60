"""mlx-lm's server with our cache in place of its own: it answers as it would cold, and its cache's faults are gone."""

from __future__ import annotations

import subprocess
import sys
import time
from typing import Any

import mlx.core as mx
import mlx_lm.server as server
import pytest
from mlx_lm.generate import stream_generate
from mlx_lm.models.cache import ArraysCache, KVCache, LRUPromptCache, RotatingKVCache, make_prompt_cache

from mlx_audit.prefix import PrefixPromptCache
from mlx_audit.prefix.mlx_lm_server import _budget, installed
from mlx_audit.prefix.snapshot_compare import differences
from prefix.caching import KEY, bytes_held, cold_run, digests, feed_rows, linear
from prefix.served import options, serving, tokenizer
from prefix_models import often, prefilled, subject, text

T = text(100)


def greedy(family: str, prompt: list[int], count: int = 6) -> list[int]:
    """Return what plain mlx-lm answers without any prefix reuse, fed token by token after the prompt."""
    model = subject(family)
    caches, chosen = make_prompt_cache(model), []
    chunk = prompt
    for _ in range(count):
        logits = model(mx.array([chunk]), cache=caches)[0, -1]
        chosen.append(int(mx.argmax(logits).item()))
        chunk = chosen[-1:]
    return chosen


def in_order(caches: list[Any]) -> list[Any]:
    """Put rings in the order of time: mlx-lm's batches keep the rows of theirs in another order."""
    for cache in caches:
        if isinstance(cache, RotatingKVCache):
            cache.keys, cache.values = map(cache._temporal_order, (cache.keys, cache.values))
            cache._idx = cache.keys.shape[2]
    return caches


@pytest.mark.parametrize("family", often("llama", "gemma3_text", "qwen3_next"))
@pytest.mark.parametrize("seed", [None, 1], ids=["batched", "single"])
def test_the_server_answers_as_it_would_cold(family: str, seed: int | None) -> None:
    first, cache = T[:20], PrefixPromptCache()
    with serving(family, cache) as served:
        answer, cached = served.ask(first, seed=seed)
        assert (answer, cached) == (greedy(family, first), 0)
        second = first + answer + T[40:45]
        answer, cached = served.ask(second, seed=seed)
        assert answer == greedy(family, second)
        assert cached >= 19
        for prompt in (
            second,
            first,
            first[:19],
            first[:7],
        ):  # exact repeats, a stored boundary, a shorter prompt
            answer, cached = served.ask(prompt, seed=seed)
            assert answer == greedy(family, prompt)
            assert cached < len(prompt)
        assert served.generator.generation_available()
    stats = cache.stats()
    assert stats.hits >= 2
    assert (stats.failures, stats.leases) == ({}, 0)
    assert not set(stats.not_inserted) - {"position-mismatch"}
    assert cache.nbytes == bytes_held(cache.index)
    cache.index.check()


def test_what_the_server_stores_is_the_state_of_its_key(family: str) -> None:
    cache = PrefixPromptCache()
    with serving(family, cache) as served:
        served.ask(T[:20])
    assert len(cache) >= 1
    for key, entry in cache.index.items():
        tokens, prompt = list(key), min(len(key), 19)
        ends = [*range(8, prompt, 8), prompt, *range(prompt + 1, len(tokens))]
        if family == "llama4":  # served one by one: the whole prompt but its last token in chunks
            ends = [8, 16, 19, *range(20, len(tokens))]
        wanted = cold_run(family, tokens, ends)
        found = in_order(entry.payload.snapshot().restore())
        assert differences(found, in_order(wanted.caches), len(tokens)) == []


def test_the_server_itself_makes_our_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []

    class Generator:
        def __init__(self, provider: Any, cache: Any) -> None:
            made.append(cache)

    monkeypatch.setattr(server, "ResponseGenerator", Generator)
    monkeypatch.setattr(server, "_run_http_server", lambda *_: None)
    provider = type("Provider", (), {"cli_args": options("llama", prompt_cache_size=3)})()
    with installed(max_bytes=1000):
        server.run("127.0.0.1", 0, provider)
    server.run("127.0.0.1", 0, provider)
    assert [type(one) for one in made] == [PrefixPromptCache, LRUPromptCache]
    assert (made[0].max_size, made[0].max_bytes) == (3, 1000)


def test_the_command_shows_the_servers_own_options() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "mlx_audit.prefix.mlx_lm_server", "--help"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "--prompt-cache-bytes" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "budget"),
    [
        (["--model", "m"], None),
        (["--prompt-cache-bytes", "2M"], 2_000_000),
        (["--prompt-cache-bytes=1000"], 1000),
        (["--prompt-cache-bytes", "many"], None),
        (["--prompt-cache-bytes"], None),
    ],
)
def test_the_byte_limit_of_the_command_line_is_read(arguments: list[str], budget: int | None) -> None:
    assert _budget(arguments) == budget


def test_it_has_every_call_of_the_class_that_it_stands_in_for() -> None:
    wanted = {name for name in vars(LRUPromptCache) if not name.startswith("_")} - {
        "CacheEntry",
        "CacheOrder",
    }
    assert wanted <= set(dir(PrefixPromptCache))
    ours, theirs = PrefixPromptCache(), LRUPromptCache()
    for cache in (ours, theirs):
        cache.insert_cache("m", [1, 2, 3], linear(3), cache_type="user")
        cache.insert_cache("m", [4, 5], linear(2))
        assert len(cache) == 2
        assert cache.fetch_nearest_cache("other", [1, 2, 3, 4]) == (None, [1, 2, 3, 4])
        assert {name: one["n_sequences"] for name, one in cache.stats_by_type().items()} == {
            "assistant": 1,
            "user": 1,
            "system": 0,
        }
        cache.trim_to(n_sequences=1)
        assert len(cache) == 1
        cache.trim_to(n_bytes=0)
        assert (len(cache), cache.nbytes) == (0, 0)


def test_generate_goes_on_from_what_is_fetched() -> None:
    family, prompt = "qwen3_next", T[:30]
    cache, model = PrefixPromptCache(), subject(family)
    caches, rest = cache.fetch_nearest_cache(KEY, prompt)
    for _ in range(2):
        live = caches or make_prompt_cache(model)
        answer = [
            one.token
            for one in stream_generate(model, tokenizer(), list(rest), max_tokens=6, prompt_cache=live)
        ]
        assert answer == greedy(family, prompt)
        boundary = prefilled(family, 29)
        cache.insert_cache(KEY, prompt[:29], boundary.caches)
        caches, rest = cache.fetch_nearest_cache(KEY, prompt)
        assert (len(rest), caches is None) == (1, False)


def test_an_insert_copies_and_live_decode_does_not_reach_the_entry(family: str) -> None:
    cache, run = PrefixPromptCache(), prefilled(family, 20)
    cache.insert_cache(KEY, T[:20], run.caches)
    before = digests(cache.index)
    for token in T[20:30]:
        run.feed([token])
    assert digests(cache.index) == before
    caches, rest = cache.fetch_nearest_cache(KEY, T[:21])
    assert rest == T[20:21]
    assert differences(caches or [], prefilled(family, 20).caches, 20) == []


def test_two_requests_share_no_list_and_no_array() -> None:
    cache, native = PrefixPromptCache(), ArraysCache(2)
    native.cache = [mx.ones((1, 3)), mx.zeros((1, 4))]
    cache.insert_cache(KEY, T[:5], [native])
    one, two = (cache.fetch_nearest_cache(KEY, T[:6])[0] for _ in range(2))
    assert one is not None
    assert two is not None
    one[0].cache[0] = mx.full((1, 3), 7)
    one[0].cache[1][...] = 9
    native.cache[0] = mx.full((1, 3), 5)
    assert two[0].cache[0].tolist() == [[1, 1, 1]]
    third, _ = cache.fetch_nearest_cache(KEY, T[:6])
    assert third is not None
    assert [array.tolist() for array in third[0].cache] == [[[1, 1, 1]], [[0, 0, 0, 0]]]


def test_a_restored_twin_does_not_write_to_the_live_row() -> None:
    cache, live = PrefixPromptCache(), KVCache()
    feed_rows(live, 0, 3)
    cache.insert_cache(KEY, T[:3], [live])
    caches, _ = cache.fetch_nearest_cache(KEY, T[:4])
    assert caches is not None
    feed_rows(live, 50, 1)
    feed_rows(caches[0], 80, 1)
    assert live.keys[0, 0, :4, 0].tolist() == [0, 1, 2, 50]
    assert caches[0].keys[0, 0, :4, 0].tolist() == [0, 1, 2, 80]


def test_a_wrapped_ring_is_not_trimmed() -> None:
    cache, ring = PrefixPromptCache(), RotatingKVCache(8)
    for position in range(20):
        feed_rows(ring, position, 1)
    cache.insert_cache(KEY, T[:20], [ring])
    assert cache.fetch_nearest_cache(KEY, T[:18]) == (None, T[:18])
    assert cache.stats().refusals == {"wrapped-ring": 1}


def test_limits_hold_after_every_insert() -> None:
    size = PrefixPromptCache()
    size = PrefixPromptCache()
    size.insert_cache(KEY, T[:20], linear(20))
    budget = 5 * size.nbytes
    cache = PrefixPromptCache(max_size=7, max_bytes=budget)
    for number in range(40):
        length = 5 + number % 30
        cache.insert_cache(KEY, [number, *T[1:length]], linear(length))
        assert len(cache) <= 7
        assert cache.nbytes <= budget
        assert cache.nbytes == bytes_held(cache.index)
    cache.insert_cache(KEY, T[:101] + [5] * 200, linear(300))
    assert cache.nbytes <= budget
    assert cache.stats().not_inserted == {"too-large": 1}


def test_a_short_query_against_a_long_entry_is_fast() -> None:
    ours, theirs = PrefixPromptCache(), LRUPromptCache()
    long = [(7 * index) % 97 for index in range(16_000)]
    for cache in (ours, theirs):
        cache.insert_cache(KEY, long, linear(16_000))
    spent = {}
    for name, cache in (("ours", ours), ("theirs", theirs)):
        start = time.perf_counter()
        caches, rest = cache.fetch_nearest_cache(KEY, [*long[:50], 96])
        spent[name] = time.perf_counter() - start
        assert caches is not None
        assert (rest, caches[0].offset) == ([96], 50)
    assert spent["ours"] * 5 < spent["theirs"]


def test_nothing_that_a_request_holds_ends_the_server(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "mlx_audit.prefix")
    cache = PrefixPromptCache()
    for tokens in ([], [1.5], ["x"], [2**40], [True]):
        assert cache.fetch_nearest_cache(KEY, tokens) == (None, tokens)
        cache.insert_cache(KEY, tokens, linear(1))
    cache.insert_cache(KEY, [1], [object()])
    cache.insert_cache(KEY, [1], linear(1), cache_type="robot")
    assert len(cache) == 0
    assert cache.stats().not_inserted == {"error": 5, "below-minimum": 1, "unknown-class": 1}
    assert cache.stats().failures == {"ShapeMismatch": 4}
    assert "outcome=failed" in caplog.text


def test_two_pictures_of_one_size_are_two_prefixes() -> None:
    cache = PrefixPromptCache()
    cat, dog = -(2**59) - 1, -(2**58)
    prompt = [*T[:4], cat, cat, cat, *T[7:10]]
    cache.insert_cache(KEY, prompt, linear(10))
    hit, rest = cache.fetch_nearest_cache(KEY, [*prompt, 3])
    assert hit is not None
    assert rest == [3]
    other = [*T[:4], dog, dog, dog, *T[7:10], 3]
    hit, rest = cache.fetch_nearest_cache(KEY, other)
    assert rest == other[4:]
    hit, rest = cache.fetch_nearest_cache(KEY, [*prompt[:5], 3])  # the picture in fewer patches
    assert rest == [cat, 3]
    assert cache.stats().shortenings == {"multimodal": 1}


def test_pictures_are_forgotten_and_never_mistaken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlx_audit.prefix.mlx_lm_server._MOST_PICTURES", 2)
    cache = PrefixPromptCache()
    prompt = [1, 2, -7, -7, 3, 4]
    cache.insert_cache(KEY, prompt, linear(6))
    assert list(cache.fetch_nearest_cache(KEY, prompt)[1]) == [4]
    for picture in range(8, 40):
        cache.fetch_nearest_cache(KEY, [1, 2, -picture, -picture, 3, 4])
        assert len(cache._media) <= 2
    for picture in (-8, -7):  # another one, and the forgotten one: only the text before is shared
        assert list(cache.fetch_nearest_cache(KEY, [1, 2, picture, picture, 3, 4])[1]) == [picture] * 2 + [
            3,
            4,
        ]


def test_models_adapters_and_drafts_are_apart() -> None:
    cache = PrefixPromptCache()
    keys = [("m", None, None), ("m", "a", None), ("m", None, "a"), ("a", "m", None), "m"]
    for key in keys:
        assert cache.fetch_nearest_cache(key, T[:9])[0] is None
        cache.insert_cache(key, T[:8], linear(8))
    assert len(cache) == len(keys)


def test_recency_is_by_use_within_a_type_and_answers_go_first() -> None:
    cache = PrefixPromptCache(max_size=3)
    for key, kind in (([1], "system"), ([2], "user"), ([3], "assistant"), ([4], "system")):
        cache.insert_cache(KEY, key, linear(1), cache_type=kind)
    assert sorted(list(key) for key, _ in cache.index.items()) == [[1], [2], [4]]
