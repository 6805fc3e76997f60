"""The prefix index against a list of entries, under any order of calls; and faults that this comparison must see."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from mlx_audit.prefix.index import PrefixIndex
from mlx_audit.prefix.pool import EntryPool, Ledger
from mlx_audit.prefix.radix import RadixTree
from mlx_audit.prefix.radix_key import WIDTH
from mlx_audit.prefix.radix_node import RadixNode
from prefix.naive import Key
from prefix.paired import ALPHABET, LEAVES, LIMITS, NAMESPACES, Pair, drive

KEYS = st.lists(st.sampled_from(ALPHABET), min_size=1, max_size=9).map(tuple)
SPACES = st.sampled_from(NAMESPACES)
PLACES = st.integers(0, 20)


class IndexMachine(RuleBasedStateMachine):
    """Both indices, under rules that Hypothesis orders and shrinks."""

    @initialize(limits=st.sampled_from(LIMITS))
    def start(self, limits: tuple[int, int | None]) -> None:
        self.pair = Pair(*limits)

    @rule(
        namespace=SPACES,
        key=KEYS,
        extends=st.none() | PLACES,
        sizes=st.lists(st.sampled_from(LEAVES), min_size=1, max_size=4).map(tuple),
        kind=st.sampled_from(["output", "checkpoint", "prompt"]),
        supersede=st.booleans(),
    )
    def insert(
        self, namespace: bytes, key: Key, extends: int | None, sizes: Any, kind: str, supersede: bool
    ) -> None:
        self.pair.insert(namespace, self.beginning(extends) + key, sizes, kind, supersede)

    @rule(
        namespace=SPACES,
        key=KEYS,
        extends=st.none() | PLACES,
        at_most=st.none() | st.integers(0, 9),
        use=st.sampled_from([None, "boundary", "descendant"]),
    )
    def look_up(
        self, namespace: bytes, key: Key, extends: int | None, at_most: int | None, use: str | None
    ) -> None:
        self.pair.look_up(namespace, self.beginning(extends) + key, at_most, use)

    @rule(place=PLACES)
    def lease(self, place: int) -> None:
        self.pair.lease(place)
        self.pair.lease_what_left()

    @rule(place=PLACES, failing=st.booleans())
    def release(self, place: int, failing: bool) -> None:
        self.pair.release(place, failing)

    @rule(place=PLACES)
    def remove(self, place: int) -> None:
        self.pair.remove(place)

    @rule(namespace=st.none() | SPACES)
    def clear(self, namespace: bytes | None) -> None:
        self.pair.clear(namespace)

    @rule(max_bytes=st.integers(0, 60), max_entries=st.none() | st.integers(0, 5))
    def trim_to(self, max_bytes: int, max_entries: int | None) -> None:
        self.pair.trim_to(max_bytes, max_entries)

    @invariant()
    def alike(self) -> None:
        if hasattr(self, "pair"):
            self.pair.compare()

    def beginning(self, place: int | None) -> Key:
        """The key of a stored entry, so that most queries share something."""
        stored = self.pair.naive.stored
        return stored[place % len(stored)].key if stored and place is not None else ()


TestIndex = IndexMachine.TestCase
TestIndex.settings = settings(max_examples=60, stateful_step_count=30)


@pytest.mark.parametrize("seed", range(6))
def test_it_answers_like_a_list_of_entries(seed: int) -> None:
    drive(seed, 500)


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(100, 120))
def test_it_answers_like_a_list_of_entries_for_long(seed: int) -> None:
    drive(seed, 5_000)


def evicts_before_it_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Room is made without regard to the entry that is replaced."""
    victims = EntryPool.victims
    monkeypatch.setattr(
        EntryPool,
        "victims",
        lambda self, leaves, leaving, *limits, **new: victims(self, leaves, (), *limits, **new),
    )


def merges_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node whose entry went stays, though it has one child."""
    monkeypatch.setattr("mlx_audit.prefix.radix.to_join", lambda node, parent: None)


def takes_index_0_for_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """A boundary after the first token is not seen."""
    boundaries = RadixTree.boundaries
    monkeypatch.setattr(
        RadixTree,
        "boundaries",
        lambda *query: tuple(found for found in boundaries(*query) if found.matched > 1),
    )


def refreshes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The order of insertion decides what is evicted."""
    monkeypatch.setattr(PrefixIndex, "_touch", lambda self, entry: None)


def evicts_what_is_leased(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leases are not looked at when room is made."""
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


def lets_go_of_leased_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bytes of a leased entry are forgotten when it leaves the index."""
    remove = EntryPool.remove

    def patched(self: Any, entry: Any, why: str) -> Any:
        leases, entry.leases = entry.leases, 0
        place = remove(self, entry, why)
        entry.leases = leases
        return place

    monkeypatch.setattr(EntryPool, "remove", patched)


def counts_shared_leaves_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes are summed over entries."""
    add = Ledger.add

    def patched(self: Any, leaves: Any) -> None:
        self.nbytes += sum(size for leaf, size in leaves.items() if self.count(leaf))
        add(self, leaves)

    monkeypatch.setattr(Ledger, "add", patched)


def supersedes_unasked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorter prefixes go whether or not the stack can be trimmed."""
    insert = PrefixIndex._insert
    monkeypatch.setattr(
        PrefixIndex, "_insert", lambda self, entry, key, supersede: insert(self, entry, key, True)
    )


def evicts_by_age_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kinds of entries are not told apart."""

    def patched(self: Any) -> Any:
        return iter(
            sorted(itertools.chain.from_iterable(self._places.values()), key=lambda e: self.place(e).stamp)
        )

    monkeypatch.setattr(EntryPool, "__iter__", patched)


def splits_at_a_lookup(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lookup that ends within an edge cuts it there."""
    walk = RadixTree._walk

    def patched(self: Any, namespace: bytes, data: bytes, limit: int) -> Any:
        found = walk(self, namespace, data, limit)
        node, depth = found.path[-1] if found.path else (None, 0)
        if node is not None and found.below is not node and limit < len(data):
            self._forked(node, found.below, found.matched - depth, b"")
        return found

    monkeypatch.setattr(RadixTree, "_walk", patched)


def parts_within_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """The common length is counted in bytes, not in whole tokens."""

    def patched(edge: bytes, data: bytes, offset: int, limit: int) -> int:
        pairs = zip(edge, data[offset:limit], strict=False)
        return next((index for index, (one, other) in enumerate(pairs) if one != other), len(edge))

    monkeypatch.setattr("mlx_audit.prefix.radix.common_length", patched)


def mixes_namespaces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Queries without a namespace see those of another."""
    walk = RadixTree._walk
    monkeypatch.setattr(
        RadixTree, "_walk", lambda self, namespace, *query: walk(self, namespace or b"a", *query)
    )


def takes_any_descendant(monkeypatch: pytest.MonkeyPatch) -> None:
    """Below the matched point, the order of a dict decides."""

    def patched(top: RadixNode[Any]) -> Any:
        stack = [top]
        while stack:
            node = stack.pop()
            if node.value is not None:
                yield node
            stack.extend(node.children.values())

    monkeypatch.setattr("mlx_audit.prefix.radix.latest_first", patched)


def forgets_the_latest(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was used last below a node is not found anew when it goes."""
    monkeypatch.setattr("mlx_audit.prefix.radix.age", lambda node, gone: None)


def finds_beyond_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lookup may answer with the whole query, so that no token is left to feed."""
    monkeypatch.setattr(
        "mlx_audit.prefix.radix._limited", lambda tokens, at_most: (tokens.data, len(tokens) * WIDTH)
    )


PLANTED = [
    evicts_before_it_looks,
    merges_nothing,
    takes_index_0_for_none,
    refreshes_nothing,
    evicts_what_is_leased,
    lets_go_of_leased_bytes,
    counts_shared_leaves_twice,
    supersedes_unasked,
    evicts_by_age_alone,
    splits_at_a_lookup,
    parts_within_a_token,
    mixes_namespaces,
    takes_any_descendant,
    forgets_the_latest,
    finds_beyond_the_limit,
]


@pytest.mark.parametrize("plant", PLANTED, ids=lambda plant: plant.__name__)
def test_a_planted_fault_is_seen(
    plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Without a fault, the same calls are green: `test_it_answers_like_a_list_of_entries`.
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        drive_all()


def drive_all() -> None:
    for seed in range(3):
        drive(seed, 500)
