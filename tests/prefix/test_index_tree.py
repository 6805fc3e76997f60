"""The radix tree by itself: its shape, its two lookups, and the checks of its invariants."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import pytest

from mlx_audit.prefix.radix import RadixTree
from mlx_audit.prefix.radix_key import IndexMisuse, TokenKey
from mlx_audit.prefix.radix_node import RadixNode

N = b"namespace"


def tree_of(*keys: list[int]) -> RadixTree[str]:
    tree: RadixTree[str] = RadixTree()
    for key in keys:
        tree.insert(N, key, " ".join(map(str, key)))
    tree.check()
    return tree


def test_keys_share_the_edges_that_they_begin_with() -> None:
    tree = tree_of([1, 2, 3, 4], [1, 2, 5], [1, 2, 3])
    assert [(list(TokenKey.of_bytes(node.edge)), node.value) for node in tree] == [
        ([], None),
        ([1, 2], None),
        ([3], "1 2 3"),
        ([4], "1 2 3 4"),
        ([5], "1 2 5"),
    ]
    assert (tree.nodes, tree.entries, tree.edge_bytes) == (5, 3, 20)


@pytest.mark.parametrize("place", range(4))
def test_what_is_removed_leaves_the_tree_of_the_rest(place: int) -> None:
    keys = [[1, 2, 3, 4], [1, 2, 5], [1, 2, 3], [9]]
    tree = tree_of(*keys)
    node = tree.find(N, keys[place])
    assert node is not None
    assert tree.remove(node) == " ".join(map(str, keys[place]))
    tree.check()
    rest = tree_of(*keys[:place], *keys[place + 1 :])
    assert [(node.edge, node.value) for node in tree] == [(node.edge, node.value) for node in rest]
    with pytest.raises(IndexMisuse, match="the node has no entry"):
        tree.remove(node)


def test_the_last_entry_takes_its_namespace_along() -> None:
    tree = tree_of([1, 2])
    node = tree.find(N, [1, 2])
    assert node is not None
    tree.remove(node)
    tree.check()
    assert (tree.roots, tree.nodes, tree.edge_bytes) == ({}, 0, 0)


def test_a_prefix_of_one_token_is_found() -> None:
    tree = tree_of([7])
    found = tree.boundary(N, [7, 8, 9])
    assert found is not None
    assert (found.node.value, found.matched) == ("7", 1)
    assert tree.boundary(N, [7]) == found


def test_boundaries_are_whole_keys_from_the_deepest_up() -> None:
    tree = tree_of([1], [1, 2, 3], [1, 2, 3, 4, 5], [1, 9])
    values = [(found.node.value, found.matched) for found in tree.boundaries(N, [1, 2, 3, 4, 6])]
    assert values == [("1 2 3", 3), ("1", 1)]
    assert [found.matched for found in tree.boundaries(N, [1, 2, 3, 4, 5])] == [5, 3, 1]
    assert [found.matched for found in tree.boundaries(N, [1, 2, 3, 4, 5], at_most=4)] == [3, 1]
    assert tree.boundary(N, [2, 1]) is None
    assert tree.boundary(N, []) is None
    assert tree.boundary(N, [1], at_most=0) is None
    assert tree.boundary(b"other", [1]) is None


def test_descendants_share_the_most_and_the_latest_is_first() -> None:
    tree = tree_of([1, 2, 3, 4], [1, 2, 3, 5], [1, 2, 9], [8])
    asked = [1, 2, 3, 7]
    assert [(f.node.value, f.matched) for f in tree.descendants(N, asked, limit=9)] == [
        ("1 2 3 5", 3),
        ("1 2 3 4", 3),
    ]
    node = tree.find(N, [1, 2, 3, 4])
    assert node is not None
    tree.touch(node)
    found = tree.descendant(N, asked)
    assert found is not None
    assert (found.node.value, found.matched) == ("1 2 3 4", 3)
    assert [f.node.value for f in tree.descendants(N, asked, at_most=2, limit=9)] == [
        "1 2 3 4",
        "1 2 9",
        "1 2 3 5",
    ]
    assert tree.descendant(N, [5]) is None
    assert tree.descendant(N, []) is None
    assert tree.descendant(b"other", asked) is None


def test_an_entry_that_ends_where_the_query_parts_is_a_descendant() -> None:
    found = tree_of([1, 2]).descendant(N, [1, 2, 3])
    assert found is not None
    assert (found.node.value, found.matched) == ("1 2", 2)


def test_a_lookup_changes_nothing() -> None:
    tree = tree_of([1, 2, 3, 4], [1, 2, 5])
    before = [(node, node.edge, node.stamp, node.latest, list(node.children)) for node in tree]
    for length in range(6):
        query = [1, 2, 3, 9, 9][:length]
        tree.boundaries(N, query)
        tree.descendants(N, query, limit=5)
        tree.find(N, query)
    assert [(node, node.edge, node.stamp, node.latest, list(node.children)) for node in tree] == before


def test_a_node_stays_the_same_object_as_long_as_its_entry() -> None:
    tree = tree_of([1, 2, 3, 4])
    node = tree.find(N, [1, 2, 3, 4])
    assert node is not None
    upper = tree.insert(N, [1, 2], "upper")
    assert tree.find(N, [1, 2, 3, 4]) is node
    assert list(tree.key(node)) == [1, 2, 3, 4]
    tree.remove(upper)
    assert tree.find(N, [1, 2, 3, 4]) is node
    assert list(tree.key(node)) == [1, 2, 3, 4]


@pytest.mark.parametrize(("key", "value"), [([], "value"), ([1], None)])
def test_an_entry_needs_a_token_and_a_value(key: list[int], value: str | None) -> None:
    tree = tree_of([1, 2])
    with pytest.raises(IndexMisuse, match="at least one token, and a value"):
        tree.insert(N, key, value)  # type: ignore[arg-type]
    tree.check()
    assert tree.nodes == 2


def test_no_memory_for_a_joined_edge_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    tree = tree_of([1], [1, 2])
    node = tree.find(N, [1])
    assert node is not None

    def fails(node: object, parent: object) -> None:
        raise MemoryError

    monkeypatch.setattr("mlx_audit.prefix.radix.to_join", fails)
    with pytest.raises(MemoryError):
        tree.remove(node)
    tree.check()
    assert tree.find(N, [1]) is node


class Array:
    """Something that can be asked whether it is still there."""


def test_a_tree_that_nobody_holds_is_freed_at_once() -> None:
    tree: RadixTree[Array] = RadixTree()
    value = Array()
    tree.insert(N, [1, 2, 3], value)
    tree.insert(N, [1, 2], Array())
    left = weakref.ref(value)
    gc.disable()
    try:
        del tree, value
        assert left() is None
    finally:
        gc.enable()


def test_a_path_of_many_entries_needs_no_deep_recursion() -> None:
    tree: RadixTree[int] = RadixTree()
    ids = list(range(1_000))
    for length in range(1, 1_001):
        tree.insert(N, ids[:length], length)
    tree.check()
    assert len(tree.boundaries(N, ids)) == 1_000
    assert repr(tree) == "<RadixTree 1,000 entries, 1,001 nodes, 4,000 edge bytes, 1 namespaces>"
    del tree


def empties_an_edge(tree: RadixTree[str], node: RadixNode[str]) -> None:
    node.edge = b""


def cuts_a_token(tree: RadixTree[str], node: RadixNode[str]) -> None:
    node.edge += b"\0"


def hangs_it_under_another(tree: RadixTree[str], node: RadixNode[str]) -> None:
    node.parent = tree.roots[N]


def takes_the_value(tree: RadixTree[str], node: RadixNode[str]) -> None:
    node.value, node.stamp = None, 0


def changes_the_first_token(tree: RadixTree[str], node: RadixNode[str]) -> None:
    node.edge = b"\1" + node.edge[1:]


def loses_the_stamp(tree: RadixTree[str], node: RadixNode[str]) -> None:
    node.stamp = 0


def loses_what_is_latest(tree: RadixTree[str], node: RadixNode[str]) -> None:
    node.latest = 1


def counts_a_node_more(tree: RadixTree[str], node: RadixNode[str]) -> None:
    tree.nodes += 1


def counts_an_entry_less(tree: RadixTree[str], node: RadixNode[str]) -> None:
    tree.entries -= 1


def counts_a_byte_more(tree: RadixTree[str], node: RadixNode[str]) -> None:
    tree.edge_bytes += 1


def moves_the_root(tree: RadixTree[str], node: RadixNode[str]) -> None:
    tree.roots[b"other"] = tree.roots.pop(N)


def keeps_an_empty_root(tree: RadixTree[str], node: RadixNode[str]) -> None:
    tree.roots[N].children.clear()


@pytest.mark.parametrize(
    ("breaks", "said"),
    [
        (empties_an_edge, "an edge is empty"),
        (cuts_a_token, "an edge ends within a token"),
        (hangs_it_under_another, "another parent"),
        (takes_the_value, "neither an entry nor two children"),
        (changes_the_first_token, "child 3 has the edge"),
        (loses_the_stamp, "an entry and its stamp don't agree"),
        (loses_what_is_latest, "the latest stamp below is 1, reported as 2"),
        (counts_a_node_more, "5 nodes reported, 4 counted"),
        (counts_an_entry_less, "1 entries reported, 2 counted"),
        (counts_a_byte_more, "17 edge bytes reported, 16 counted"),
        (moves_the_root, "another namespace"),
        (keeps_an_empty_root, "a namespace without entries is left"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_broken_tree_is_named(breaks: Callable[[RadixTree[str], RadixNode[str]], None], said: str) -> None:
    tree = tree_of([1, 2, 5], [1, 2, 3])
    node = tree.find(N, [1, 2, 3])
    assert node is not None
    breaks(tree, node)
    with pytest.raises(AssertionError, match=said):
        tree.check()
