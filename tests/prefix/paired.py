"""The prefix index and the naive one under the same calls, compared after each."""

from __future__ import annotations

import random
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

from mlx_audit.prefix.index import PrefixIndex
from mlx_audit.prefix.pool import Entry
from prefix.naive import Blob, Key, NaiveIndex, Stored

ALPHABET = (0, 1, 256, 257, 2**31 - 1)
"""Ids that share bytes: an edge must not part within a token."""

NAMESPACES = (b"", b"a", b"b")
LEAVES = [(f"leaf{index}", index % 7) for index in range(24)]
LIMITS = [(60, None), (30, 4), (1000, 6), (20, 3)]


@dataclass
class Pair:
    """Two indices that must answer alike."""

    max_bytes: int
    max_entries: int | None
    held: list[tuple[AbstractContextManager[Any], Entry[Blob], Stored]] = field(default_factory=list)
    made: int = 0

    def __post_init__(self) -> None:
        self.real: PrefixIndex[Blob] = PrefixIndex(self.max_bytes, self.max_entries)
        self.naive = NaiveIndex(self.max_bytes, self.max_entries)

    def insert(
        self, namespace: bytes, key: Key, sizes: tuple[tuple[str, int], ...], kind: Any, supersede: bool
    ) -> None:
        self.made += 1
        blob = Blob(self.made, sizes)
        got = self.real.insert(namespace, list(key), blob, kind, supersede=supersede)
        reason, evicted = self.naive.insert(namespace, key, blob, kind, supersede)
        assert got.reason == reason
        assert (got.entry is None) == (reason is not None)
        assert [entry.payload.name for entry in got.evicted] == [entry.blob.name for entry in evicted]

    def look_up(self, namespace: bytes, query: Key, at_most: int | None, use: str | None) -> None:
        """Ask for all candidates of both lookups; then use the first of one of them, or none."""
        before = self.real.tree()
        boundaries = self.real.boundaries(namespace, list(query), at_most)
        wanted = self.naive.boundaries(namespace, query, at_most)
        assert [(m.entry.payload.name, m.matched) for m in boundaries] == [
            (e.blob.name, len(e.key)) for e in wanted
        ]
        below = self.real.descendants(namespace, list(query), at_most, limit=100)
        matched, wanted_below = self.naive.descendants(namespace, query, at_most)
        assert [(m.entry.payload.name, m.matched) for m in below] == [
            (e.blob.name, matched) for e in wanted_below
        ]
        if use is not None:
            method = self.real.boundary if use == "boundary" else self.real.descendant
            expected = wanted if use == "boundary" else wanted_below
            used = method(namespace, list(query), at_most)
            assert (used and used.entry.payload.name) == (expected[0].blob.name if expected else None)
            if expected:
                self.naive.touch(expected[0])
        assert self.real.tree() == before

    def lease(self, place: int) -> None:
        """Lease the entry at some place of the order, or one that left and is still held by its first holder."""
        items = self.naive.in_order(self.naive.stored)
        entries = {entry.payload.name: entry for _, entry in self.real.items()}
        if items:
            stored = items[place % len(items)]
            manager = self.real.lease(entries[stored.blob.name])
            assert manager.__enter__() is entries[stored.blob.name]
            self.held.append((manager, entries[stored.blob.name], stored))
            self.naive.touch(stored)
            stored.leases += 1

    def lease_what_left(self) -> None:
        """A lease of what is no longer in the index gives nothing, and counts nothing."""
        for _, entry, stored in self.held:
            if stored in self.naive.detached:
                with self.real.lease(entry) as nothing:
                    assert nothing is None

    def release(self, place: int, failing: bool) -> None:
        if not self.held:
            return
        manager, entry, stored = self.held.pop(place % len(self.held))
        assert entry.payload is stored.blob
        assert (entry.left is None) == (stored in self.naive.stored)
        error = ValueError("in the block")
        manager.__exit__(ValueError if failing else None, error if failing else None, None)
        self.naive.release(stored)

    def remove(self, place: int) -> None:
        items = self.naive.in_order(self.naive.stored)
        if items:
            stored = items[place % len(items)]
            (entry,) = [e for _, e in self.real.items() if e.payload.name == stored.blob.name]
            assert self.real.remove(entry)
            assert not self.real.remove(entry)
            self.naive.let_go([stored])

    def clear(self, namespace: bytes | None) -> None:
        gone = [e for e in self.naive.stored if namespace in (None, e.namespace)]
        assert self.real.clear(namespace) == len(gone)
        self.naive.let_go(gone)

    def trim_to(self, max_bytes: int, max_entries: int | None) -> None:
        evicted = self.real.trim_to(max_bytes, max_entries)
        wanted = self.naive.trim_to(max_bytes, max_entries)
        assert [entry.payload.name for entry in evicted] == [entry.blob.name for entry in wanted]

    def compare(self) -> None:
        """All invariants hold, and both hold the same, in the same order of eviction."""
        self.real.check()
        items = [
            (e.payload.name, e.namespace, tuple(key), e.kind.value, e.leases) for key, e in self.real.items()
        ]
        assert items == [
            (e.blob.name, e.namespace, e.key, e.kind, e.leases)
            for e in self.naive.in_order(self.naive.stored)
        ]
        stats = self.real.stats
        assert stats.nbytes == self.real.nbytes == self.naive.nbytes <= self.max_bytes
        assert (stats.entries, stats.leases) == (len(self.naive.stored), self.naive.leases)
        assert stats.detached == len(self.naive.detached)
        assert (stats.nodes, stats.edge_bytes) == (self.naive.nodes, self.naive.edge_bytes)


def drive(seed: int, count: int) -> Pair:
    """Make `count` random calls, compare after each, and let all leases end."""
    rng = random.Random(seed)
    pair = Pair(*rng.choice(LIMITS))
    for _ in range(count):
        one_random_call(pair, rng)
        pair.compare()
    while pair.held:
        pair.release(0, failing=rng.random() < 0.5)
        pair.compare()
    assert pair.real.stats.leases == 0
    return pair


def one_random_call(pair: Pair, rng: random.Random) -> None:
    namespace = rng.choices(NAMESPACES, (8, 3, 1))[0]
    key = random_key(pair, rng)
    at_most = rng.choice([None, None, len(key) - 1, rng.randrange(8)])
    kind = rng.randrange(100)
    if kind < 40:
        sizes = tuple(rng.sample(LEAVES, rng.randrange(1, 5)))
        pair.insert(namespace, key, sizes, rng.choice(["output", "checkpoint", "prompt"]), rng.random() < 0.2)
    elif kind < 70:
        pair.look_up(namespace, key, at_most, rng.choice([None, "boundary", "descendant"]))
    elif kind < 79:
        if len(pair.held) < 4:
            pair.lease(rng.randrange(100))
        pair.lease_what_left()
    elif kind < 90:
        pair.release(rng.randrange(100), failing=rng.random() < 0.3)
    elif kind < 96:
        pair.remove(rng.randrange(100))
    elif kind < 98:
        pair.trim_to(rng.randrange(60), rng.choice([None, rng.randrange(6)]))
    elif kind < 99:
        pair.clear(rng.choice([None, *NAMESPACES]))


def random_key(pair: Pair, rng: random.Random) -> Key:
    """A key that mostly begins like a stored one."""
    start: Key = ()
    if pair.naive.stored and rng.random() < 0.7:
        start = rng.choice(pair.naive.stored).key
        start = start[: rng.choice([len(start), rng.randrange(len(start) + 1)])]
    return start + tuple(rng.choices(ALPHABET, k=rng.randrange(0 if start else 1, 5)))
