"""What the index costs, beside mlx-lm's trie in the same run: time of a lookup, bytes a token, nodes that are left."""

from __future__ import annotations

import gc
import random
import time
import tracemalloc
from collections.abc import Callable
from typing import Any

import pytest
from mlx_lm.models.cache import PromptTrie

from mlx_audit.prefix.index import PrefixIndex
from mlx_audit.prefix.pool import EntryKind
from mlx_audit.prefix.radix import RadixTree, _Walk
from mlx_audit.prefix.radix_key import TokenKey, common_length, token_at
from prefix.naive import Blob

N = b"namespace"
LENGTH = 18_000


def ids(count: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(150_000) for _ in range(count)]


def least(times: int, call: Callable[[], Any]) -> float:
    """Seconds of the fastest of some calls: what a busy machine adds is left out on both sides."""
    seconds = []
    for _ in range(times):
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def both(keys: list[list[int]]) -> tuple[RadixTree[int], PromptTrie]:
    """The same keys in the tree and in mlx-lm's trie."""
    tree: RadixTree[int] = RadixTree()
    trie = PromptTrie()
    for number, key in enumerate(keys, 1):
        tree.insert(N, key, number)
        trie.add(N, key, number)
    return tree, trie


def test_a_lookup_of_18_000_tokens_is_50_times_faster_than_in_the_trie_of_mlx_lm() -> None:
    shared = ids(LENGTH)
    keys = [shared[:length] + ids(20, seed=length) for length in range(200, LENGTH, 500)] + [shared[:17_990]]
    tree, trie = both(keys)
    key = TokenKey(shared)
    found, theirs = tree.boundary(N, key), trie.search(N, shared)
    assert found is not None
    assert (found.matched, len(theirs.shorter)) == (17_990, 17_990)
    ours = least(60, lambda: tree.boundary(N, key))
    other = least(15, lambda: trie.search(N, shared))
    assert other >= 50 * ours, f"{1e6 * ours:.0f} us, mlx-lm {1e6 * other:.0f} us"
    # A request packs its tokens once, whatever it asks afterwards; even the first lookup is faster.
    packed = least(30, lambda: tree.boundary(N, TokenKey(shared)))
    assert other > packed, f"{1e6 * packed:.0f} us with packing, mlx-lm {1e6 * other:.0f} us"


def test_a_short_query_of_a_long_entry_costs_no_walk_below_it() -> None:
    long = ids(2_000)
    tree, trie = both([long])
    query = long[:200]
    key = TokenKey(query)
    found, theirs = tree.descendant(N, key), trie.search(N, query)
    assert found is not None
    assert (found.matched, theirs.common_prefix, len(theirs.longer)) == (200, 200, 2_000)
    assert least(3, lambda: trie.search(N, query)) >= 50 * least(30, lambda: tree.descendant(N, key))


def grown(fill: Callable[[], object]) -> int:
    """Bytes that are held after `fill`, by what it returns."""
    gc.collect()
    tracemalloc.start()
    try:
        held = fill()
        gc.collect()
        current, _ = tracemalloc.get_traced_memory()
        assert held is not None
        return current
    finally:
        tracemalloc.stop()


def memory_of_both(unique: int, entries: int) -> tuple[int, int]:
    """Bytes for keys that share nothing, made before anything is counted."""
    keys = [ids(unique // entries, seed) for seed in range(entries)]

    def ours() -> RadixTree[int]:
        tree: RadixTree[int] = RadixTree()
        for number, key in enumerate(keys, 1):
            tree.insert(N, key, number)
        return tree

    def theirs() -> PromptTrie:
        trie = PromptTrie()
        for number, key in enumerate(keys, 1):
            trie.add(N, key, number)
        return trie

    return grown(ours), grown(theirs)


@pytest.mark.parametrize("unique", [50_000, pytest.param(1_000_000, marks=pytest.mark.nightly)])
def test_a_unique_token_takes_a_twentieth_of_the_memory(unique: int) -> None:
    ours, theirs = memory_of_both(unique, entries=unique // 5_000)
    assert 4 * unique <= ours <= theirs / 20, f"{ours:,} bytes, mlx-lm {theirs:,}"


def two_turns(count: int, entries: int) -> PrefixIndex[Blob]:
    """Conversations of two turns after a common beginning, each turn stored; all but the last ones have gone."""
    index: PrefixIndex[Blob] = PrefixIndex(10**9, max_entries=entries)
    system, rng = ids(50), random.Random(1)
    for number in range(count):
        first = [*system, *(rng.randrange(1000) for _ in range(20))]
        second = [*first, *(rng.randrange(1000) for _ in range(20))]
        index.insert(N, first, Blob(0, ((2 * number, 1),)), EntryKind.PROMPT)  # type: ignore[arg-type]
        index.insert(N, second, Blob(0, ((2 * number + 1, 1),)), EntryKind.PROMPT)  # type: ignore[arg-type]
    return index


@pytest.mark.parametrize("count", [1_000, pytest.param(20_000, marks=pytest.mark.nightly)])
def test_conversations_that_have_gone_leave_no_nodes(count: int) -> None:
    index = two_turns(count, 64)
    index.check()
    stats = index.stats
    assert (stats.entries, stats.evictions) == (64, 2 * count - 64)
    assert stats.nodes <= 129


def test_nodes_that_are_not_merged_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlx_audit.prefix.radix.to_join", lambda node, parent: None)
    index = two_turns(300, 64)
    with pytest.raises(AssertionError, match="neither an entry nor two children"):
        index.check()


def nested(entries: int, step: int) -> tuple[RadixTree[int], TokenKey]:
    """A path of entries, and a query that goes on beyond the last."""
    tree: RadixTree[int] = RadixTree()
    all_ids = ids(entries * step + 10)
    for number in range(1, entries + 1):
        tree.insert(N, all_ids[: number * step], number)
    return tree, TokenKey(all_ids)


def copied_by(call: Callable[[], Any]) -> int:
    """The most bytes that a call holds at once."""
    call()
    tracemalloc.start()
    try:
        call()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def lookups(tree: RadixTree[int], key: TokenKey) -> Callable[[], Any]:
    return lambda: (tree.boundary(N, key), tree.descendant(N, key), tree.find(N, key))


def test_no_part_of_a_query_is_copied_while_it_is_looked_up() -> None:
    tree, key = nested(20, 5_000)
    assert copied_by(lookups(tree, key)) < len(key.data) / 50
    # Also where the query parts from a long edge near its end.
    other = list(key)
    other[97_000] += 1
    assert copied_by(lookups(tree, TokenKey(other))) < len(key.data) / 50


def slices(self: Any, namespace: bytes, data: bytes, limit: int) -> _Walk[Any]:
    """A walk that cuts off what it has matched: right, and quadratic."""
    node, path, offset, rest = self.roots.get(namespace), [], 0, data[:limit]
    while node is not None:
        path.append((node, offset))
        child = node.children.get(token_at(rest, 0)) if rest else None
        if child is None:
            break
        if not rest.startswith(child.edge):
            return _Walk(path, offset + common_length(child.edge, rest, 0, len(rest)), child)
        node, offset, rest = child, offset + len(child.edge), rest[len(child.edge) :]
    return _Walk(path, offset, node)


def test_a_walk_that_slices_the_query_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    tree, key = nested(20, 5_000)
    monkeypatch.setattr(RadixTree, "_walk", slices)
    found = tree.boundary(N, key)
    assert found is not None
    assert found.matched == 100_000
    assert copied_by(lookups(tree, key)) > len(key.data) / 2
