"""The prefix index as its callers see it: namespaces, lookups, order, what it shows, what it refuses."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable
from typing import Any

import pytest

from mlx_audit.errors import ShapeMismatch
from mlx_audit.prefix.index import PrefixIndex
from mlx_audit.prefix.pool import EntryKind
from mlx_audit.prefix.radix_key import IndexMisuse, TokenKey
from prefix.naive import Blob

N = b"namespace"
MUCH = 10**9


def index_of(*keys: list[int], namespace: bytes = N) -> PrefixIndex[Blob]:
    index: PrefixIndex[Blob] = PrefixIndex(MUCH)
    for number, key in enumerate(keys):
        assert index.insert(namespace, key, Blob(number, ((f"leaf {number}", 8),))).entry is not None
    return index


def test_namespaces_share_nothing() -> None:
    index: PrefixIndex[Blob] = PrefixIndex(MUCH)
    spaces = [b"", b"adapter=X", b"salt=X", b"adapter=X salt=", b"media 1", b"media 2"]
    for number, space in enumerate(spaces):
        index.insert(space, [1, 2, 3], Blob(number, ((number, 1),)))  # type: ignore[arg-type]
        index.check()
    for number, space in enumerate(spaces):
        for match in (index.boundary(space, [1, 2, 3, 4]), index.descendant(space, [1, 2])):
            assert match is not None
            assert (match.entry.payload.name, match.entry.namespace) == (number, space)
    assert index.boundary(b"adapter", [1, 2, 3, 4]) is None
    assert index.descendant(b"adapter", [1, 2, 3, 4]) is None
    assert index.stats.nodes == 2 * len(spaces)
    assert index.clear(b"salt=X") == 1
    assert index.boundary(b"salt=X", [1, 2, 3]) is None
    assert len(index) == len(spaces) - 1
    index.check()


def test_a_prefix_of_one_token_is_found() -> None:
    index = index_of([7])
    match = index.boundary(N, [7, 8, 9])
    assert match is not None
    assert (match.entry.payload.name, match.matched) == (0, 1)


def test_what_was_fetched_is_not_the_first_to_go() -> None:
    index: PrefixIndex[Blob] = PrefixIndex(MUCH, max_entries=2)
    for key in ([1], [2]):
        index.insert(N, key, Blob(0, ((f"{key}", 1),)))
    assert index.boundary(N, [1, 5]) is not None
    index.insert(N, [3], Blob(0, (("c", 1),)))
    assert [list(key) for key, _ in index.items()] == [[1], [3]]


def test_a_caller_may_refuse_the_deepest_and_take_the_next() -> None:
    index = index_of([1, 2], [1, 2, 3, 4], [1, 2, 3], [1, 5])
    query = TokenKey([1, 2, 3, 4])
    assert [match.matched for match in index.boundaries(N, query)] == [4, 3, 2]
    assert [match.matched for match in index.boundaries(N, query, at_most=3)] == [3, 2]
    assert [list(key) for key, _ in index.items()] == [[1, 2], [1, 2, 3, 4], [1, 2, 3], [1, 5]]
    served = []
    for match in index.boundaries(N, query, at_most=3):
        if match.matched == 3:
            index.remove(match.entry)
        with index.lease(match.entry) as entry:
            served.append(entry and entry.length)
    assert served == [None, 2]


@pytest.mark.parametrize("length", [15, 16, 17, 31, 32, 33])
def test_no_prefix_is_longer_than_the_query_without_its_last_token(length: int) -> None:
    ids = list(range(40))
    index = index_of(ids[:16], ids[:32])
    match = index.boundary(N, ids[:length], at_most=length - 1)
    assert (match.matched if match else 0) == {15: 0, 16: 0, 17: 16, 31: 16, 32: 16, 33: 32}[length]


def test_a_replay_is_served_by_the_longer_entry_where_it_can_be_trimmed() -> None:
    ids = list(range(30))
    index = index_of(ids)
    match = index.descendant(N, ids, at_most=29)
    assert match is not None
    assert (match.entry.length, match.matched) == (30, 29)
    assert index.boundary(N, ids, at_most=29) is None


def test_keys_come_back_and_in_the_order_of_eviction() -> None:
    index = index_of([1, 2, 3], [1, 2], [2**31 - 1])
    entry = index.insert(N, [4], Blob(9, (("last", 1),)), EntryKind.OUTPUT).entry
    assert entry is not None
    assert [list(key) for key, _ in index.items()] == [[4], [1, 2, 3], [1, 2], [2**31 - 1]]
    assert index.tokens_of(entry) == TokenKey([4])
    index.remove(entry)
    assert index.tokens_of(entry) is None
    assert not index.remove(entry)


def test_the_tree_is_plain_data_with_short_edges() -> None:
    index = index_of([1, 2, 3, 4], [1, 2, 9], list(range(100, 1_300)))
    index.insert(b"\xff", [5], Blob(7, (("more", 3),)), EntryKind.OUTPUT)
    held = index.boundary(N, [1, 2, 9])
    assert held is not None
    with index.lease(held.entry):
        rows = index.tree()
    assert json.loads(json.dumps(rows)) == rows
    name = N.hex()
    prompt = {"kind": "prompt", "nbytes": 8, "leases": 0}
    assert rows == [
        {"namespace": name, "depth": 0, "length": 0, "edge": "", "entry": None},
        {"namespace": name, "depth": 1, "length": 2, "edge": "1 2", "entry": None},
        {"namespace": name, "depth": 2, "length": 4, "edge": "3 4", "entry": prompt},
        {"namespace": name, "depth": 2, "length": 3, "edge": "9", "entry": {**prompt, "leases": 1}},
        {
            "namespace": name,
            "depth": 1,
            "length": 1_200,
            "edge": "100 101 102 103 104 … 1299 (1,200 tokens)",
            "entry": prompt,
        },
        {"namespace": "ff", "depth": 0, "length": 0, "edge": "", "entry": None},
        {
            "namespace": "ff",
            "depth": 1,
            "length": 1,
            "edge": "5",
            "entry": {"kind": "output", "nbytes": 3, "leases": 0},
        },
    ]


def test_it_shows_what_it_holds() -> None:
    index = index_of([1, 2, 3], [1, 2])
    assert repr(index) == (
        "<PrefixIndex <EntryPool 2 entries, 16 of 1,000,000,000 bytes>, "
        "<RadixTree 2 entries, 3 nodes, 12 edge bytes, 1 namespaces>>"
    )
    (_, entry), _ = index.items()
    assert repr(entry) == "<Entry prompt 3 tokens, 8 bytes, stored>"
    with index.lease(entry):
        assert repr(entry) == "<Entry prompt 3 tokens, 8 bytes, leased>"
    index.remove(entry)
    assert repr(entry) == "<Entry prompt 3 tokens, 8 bytes, removed>"


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda index, blob: index.insert("text", [1], blob), "a namespace is no bytes; found: 'text'"),
        (lambda index, blob: index.boundary(None, [1]), "a namespace is no bytes; found: None"),
        (lambda index, blob: index.descendants("text", [1]), "a namespace is no bytes"),
        (lambda index, blob: index.insert(N, [], blob), "tokens: an entry needs at least one token"),
        (
            lambda index, blob: index.insert(N, [1], blob, "user"),
            "kind: there is no such kind of entry; found: 'user'",
        ),
        (lambda index, blob: index.insert(N, [1.0], blob), "a token id is no integer"),
        (lambda index, blob: index.boundary(N, [-1]), "a token id is out of range"),
        (lambda index, blob: index.descendant(N, b"1234"), "text and raw bytes are no token ids"),
    ],
)
def test_what_has_no_meaning_is_refused(call: Callable[[Any, Blob], object], said: str) -> None:
    index = index_of([1, 2])
    before = index.tree()
    with pytest.raises((IndexMisuse, ShapeMismatch)) as refusal:
        call(index, Blob(5, (("x", 1),)))
    assert said in str(refusal.value)
    assert index.tree() == before


def test_the_index_answers_others_while_a_lease_is_held() -> None:
    index = index_of([1, 2], [3])
    match = index.boundary(N, [1, 2])
    assert match is not None
    lengths: list[int] = []

    def other() -> None:
        found = index.boundary(N, [3, 4])
        assert found is not None
        with index.lease(found.entry) as entry:
            assert entry is not None
            lengths.append(entry.length)

    with index.lease(match.entry):
        thread = threading.Thread(target=other)
        thread.start()
        thread.join(timeout=10)
    assert lengths == [1]


def test_a_payload_is_asked_for_its_leaves_outside_the_lock() -> None:
    index = index_of([1, 2])
    lengths: list[int] = []

    class Slow:
        @property
        def leaves(self) -> Iterable[tuple[str, int]]:
            thread = threading.Thread(target=lambda: lengths.append(len(index)))
            thread.start()
            thread.join(timeout=10)
            return [("slow", 1)]

    assert index.insert(N, [5], Slow()).entry is not None  # type: ignore[arg-type]
    assert lengths == [1]


def loses_an_entry(index: PrefixIndex[Blob]) -> None:
    index._pool.remove(index.items()[0][1], "lost")


def exchanges_two(index: PrefixIndex[Blob]) -> None:
    (_, one), (_, two) = index.items()
    nodes = index._node(one), index._node(two)
    nodes[0].value, nodes[1].value = two, one


def changes_a_length(index: PrefixIndex[Blob]) -> None:
    index.items()[0][1].length += 1


def uses_one_in_the_tree_only(index: PrefixIndex[Blob]) -> None:
    index._tree.touch(index._node(index.items()[0][1]))


def moves_one_to_another_namespace(index: PrefixIndex[Blob]) -> None:
    index.items()[0][1].namespace = b"other"


@pytest.mark.parametrize(
    ("breaks", "said"),
    [
        (loses_an_entry, "tree and pool have different entries"),
        (exchanges_two, "the entry stands at a node of another"),
        (changes_a_length, "the entry's key has 2 tokens"),
        (uses_one_in_the_tree_only, "tree and pool disagree on what was used last"),
        (moves_one_to_another_namespace, "not found under its own key"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_broken_index_is_named(breaks: Callable[[PrefixIndex[Blob]], None], said: str) -> None:
    index = index_of([1, 2], [1, 3])
    breaks(index)
    with pytest.raises(AssertionError, match=said):
        index.check()
