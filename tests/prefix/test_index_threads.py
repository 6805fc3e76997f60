"""Many threads on one index: no leased entry goes, every answer is right, and all leases end."""

from __future__ import annotations

import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest

from mlx_audit.prefix.index import PrefixIndex
from mlx_audit.prefix.pool import Entry, EntryKind, EntryPool
from mlx_audit.prefix.radix import RadixTree

N = b"namespace"
PREFIXES = [[7] * 12, [7] * 6 + [8] * 14, [9, 9, 9], [0]]
THREADS, REQUESTS, CAP = 8, 2_000, 3


def cold(tokens: list[int], state: int = 0) -> int:
    """A state that depends on each token and on its place, continued from that of a prefix."""
    for token in tokens:
        state = (state * 1_000_003 + token + 1) % (2**61 - 1)
    return state


@dataclass(frozen=True)
class State:
    """What a request leaves behind."""

    value: int
    nbytes: int

    @property
    def leaves(self) -> Iterator[tuple[int, int]]:
        yield id(self), self.nbytes


class Cancelled(Exception):
    """A request that was given up."""


@dataclass
class Outcome:
    """What a request came to."""

    right: bool
    reused: int
    failed: bool = False


def requested(index: PrefixIndex[State], number: int) -> Outcome:
    """Restore what serves, go on from there, and store the boundary; some fail, some are cancelled in the middle."""
    rng = random.Random(number)
    prefix = rng.choice(PREFIXES)
    prompt = prefix + [100 + rng.randrange(4) for _ in range(rng.randrange(1, 4))]
    stream = served(index, prompt, len(prefix), rng)
    fate = rng.randrange(10)
    try:
        for place, _ in enumerate(stream):
            if fate == 0 and place == 1:
                stream.close()
                return Outcome(True, 0, failed=True)
            if fate == 1 and place == 1:
                stream.throw(Cancelled())
    except Cancelled:
        return Outcome(True, 0, failed=True)
    return answers[threading.get_ident()]


answers: dict[int, Outcome] = {}


def served(index: PrefixIndex[State], prompt: list[int], shared: int, rng: random.Random) -> Iterator[None]:
    reused, state = 0, 0
    for match in index.boundaries(N, prompt, at_most=len(prompt) - 1):
        with index.lease(match.entry) as entry:
            yield
            if entry is None:
                continue
            assert list(index.tokens_of(entry) or prompt[: match.matched]) == prompt[: match.matched]
            reused, state = match.matched, entry.payload.value
            yield
            break
    else:
        yield
        yield
    if not reused:
        index.count_refusal("miss")
    state = cold(prompt[reused:shared], state) if reused < shared else state
    done = max(reused, shared)
    if reused < shared:
        index.insert(N, prompt[:shared], State(state, 5), EntryKind.PROMPT)
    state = cold(prompt[done:], state)
    index.insert(N, prompt, State(state, 3), EntryKind.OUTPUT, supersede=rng.random() < 0.1)
    answers[threading.get_ident()] = Outcome(state == cold(prompt), reused)


def served_by_threads(
    monkeypatch: pytest.MonkeyPatch, requests: int
) -> tuple[PrefixIndex[State], list[Outcome]]:
    """All requests, with every eviction seen; invariants are checked meanwhile by a thread of its own."""
    index: PrefixIndex[State] = PrefixIndex(14, max_entries=CAP)
    remove, stop = EntryPool.remove, threading.Event()

    leased: list[Entry[State]] = []

    def seen(self: Any, entry: Entry[State], why: str) -> Any:
        if why == "evicted" and entry.leases:
            leased.append(entry)
        return remove(self, entry, why)

    def watch() -> int:
        looks = 0
        while not stop.wait(0.002):
            index.check()
            assert index.nbytes <= 14
            assert len(index) <= CAP
            looks += 1
        return looks

    monkeypatch.setattr(EntryPool, "remove", seen)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(THREADS + 1) as pool:
            watching = pool.submit(watch)
            try:
                outcomes = list(pool.map(partial(requested, index), range(requests)))
            finally:
                stop.set()
            assert watching.result() > 0, "nobody watched"
    finally:
        sys.setswitchinterval(interval)
    index.check()
    assert not leased, "leased entries were evicted"
    assert index.stats.leases == 0, "leases are held after the end"
    return index, outcomes


def test_requests_of_eight_threads_are_answered_as_if_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    index, outcomes = served_by_threads(monkeypatch, REQUESTS)
    assert all(outcome.right for outcome in outcomes)
    stats = index.stats
    assert (stats.leases, stats.detached) == (0, 0)
    assert 1 <= stats.entries <= CAP
    # All of it did happen: reuse and misses, evictions, failures in the middle.
    assert min(stats.hits, stats.misses, stats.evictions) > 50
    assert sum(outcome.failed for outcome in outcomes) > 100
    assert Counter(outcome.reused for outcome in outcomes)[len(PREFIXES[0])] > 20


def without_leases(monkeypatch: pytest.MonkeyPatch) -> None:
    victims = EntryPool.victims

    def patched(self: Any, *limits: Any, **new: Any) -> Any:
        leases = {entry: entry.leases for entry in self}
        for entry in leases:
            entry.leases = 0
        chosen = victims(self, *limits, **new)
        for entry, count in leases.items():
            entry.leases = count
        return chosen

    monkeypatch.setattr(EntryPool, "victims", patched)


class NoLock:
    """Nothing is kept from happening at the same time."""

    def __enter__(self) -> None: ...

    def __exit__(self, *error: object) -> None: ...


def without_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    made, touch = PrefixIndex.__init__, RadixTree.touch

    def patched(self: Any, *limits: Any, **named: Any) -> None:
        made(self, *limits, **named)
        self._lock = NoLock()

    def slow(self: Any, node: Any) -> None:
        time.sleep(1e-5)
        touch(self, node)

    monkeypatch.setattr(PrefixIndex, "__init__", patched)
    monkeypatch.setattr(RadixTree, "touch", slow)


def without_release(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EntryPool, "release", lambda self, entry: None)


@pytest.mark.parametrize(
    ("plant", "said"),
    [
        (without_leases, "leased entries were evicted|budget is exceeded"),
        (without_lock, None),
        (without_release, "leases are held after the end"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_planted_fault_is_seen(
    plant: Callable[[pytest.MonkeyPatch], None], said: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    # Without a lock anything may break, and nothing else is planted.
    with pytest.raises(Exception if not said else AssertionError, match=said):
        served_by_threads(monkeypatch, REQUESTS)
