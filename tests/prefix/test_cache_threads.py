"""Eight threads on one cache of three entries: each answers as a serial cold run, no lease is left."""

from __future__ import annotations

import random
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import mlx.core as mx
import pytest

from mlx_audit.prefix import PrefixCache
from mlx_audit.prefix.pool import EntryPool
from prefix.caching import bytes_held, cache_of
from prefix_models import text
from tiny_models import raw

THREADS, CAP = 8, 3
PREFIXES = [text(20, seed) for seed in (1, 2, 3, 4)]
SUFFIXES = [text(length, 11) for length in (1, 3, 6)]
Answer = tuple[bytes, ...]


class Cancelled(Exception):
    """A request that was given up."""


def answer(cache: PrefixCache, prompt: list[int], cancel: int | None = None) -> Answer:
    """Read a prompt and decode two tokens; return all logits."""

    def progress(done: int, count: int) -> None:
        if cancel is not None and done >= cancel:
            raise Cancelled

    logits, caches, _ = cache.prefill(prompt, stops=[20], progress=progress)
    found = [raw(logits)]
    for token in (3, 5):
        with cache.lock:
            logits = cache.model(mx.array([[token]]), cache=caches)
            mx.eval(logits)
        found.append(raw(logits))
    return tuple(found)


def drive(family: str, requests: int, monkeypatch: pytest.MonkeyPatch) -> tuple[PrefixCache, Counter[str]]:
    """Make requests from all threads at once and count how they ended."""
    prompts = [prefix + suffix for prefix in PREFIXES for suffix in SUFFIXES]
    wanted = [answer(cache_of(family, max_bytes=1), prompt) for prompt in prompts]
    assert len(set(wanted)) == len(prompts)
    cache = cache_of(family, max_entries=CAP)
    evicted: list[int] = []
    real = EntryPool.remove

    def watched(self: Any, entry: Any, why: str) -> Any:
        if why == "evicted":
            evicted.append(entry.leases)
        return real(self, entry, why)

    monkeypatch.setattr(EntryPool, "remove", watched)
    ended: Counter[str] = Counter()
    lock = threading.Lock()

    def serve(number: int) -> None:
        rng = random.Random(number)
        which = rng.randrange(len(prompts))
        how = rng.random()
        try:
            if how < 0.1:
                answer(cache, prompts[which], cancel=rng.choice([8, 16, 20, 21]))
                end = "done"
            elif how < 0.2:
                with cache.restore(prompts[which]) as taken:
                    raise ValueError(taken.plan)
            else:
                end = "right" if answer(cache, prompts[which]) == wanted[which] else "wrong"
        except (Cancelled, ValueError) as error:
            end = type(error).__name__
        with lock:
            ended[end] += 1

    def worker(first: int) -> None:
        try:
            for number in range(first, requests, THREADS):
                serve(number)
        finally:
            mx.clear_streams()  # those of this thread; a process may otherwise end before MLX has let go of them

    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(worker, range(THREADS)))
    assert set(evicted) <= {0}
    assert evicted
    return cache, ended


def check(cache: PrefixCache, ended: Counter[str], requests: int) -> None:
    stats = cache.stats()
    assert sum(ended.values()) == requests
    assert ended["wrong"] == 0
    assert min(ended[name] for name in ("right", "Cancelled", "ValueError")) > 0
    assert (stats.leases, stats.detached) == (0, 0)
    assert stats.entries <= CAP
    assert stats.hits > requests // 20
    assert stats.hits + stats.misses + sum(stats.refusals.values()) == requests
    assert stats.failures == {name: ended[name] for name in ("Cancelled", "ValueError")}
    assert cache.nbytes == bytes_held(cache.index)
    cache.index.check()


@pytest.mark.parametrize("family", ["llama", "mamba2"])
def test_every_answer_is_that_of_a_serial_cold_run(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check(*drive(family, 80, monkeypatch), 80)


@pytest.mark.nightly
@pytest.mark.parametrize("family", ["llama", "gemma3_text", "qwen3_next"])
def test_two_thousand_requests(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check(*drive(family, 2_000, monkeypatch), 2_000)
