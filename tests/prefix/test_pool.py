"""What entries cost, who goes first, and what a lease protects."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from mlx_audit.prefix.index import PrefixIndex
from mlx_audit.prefix.pool import Entry, EntryKind, EntryPool
from mlx_audit.prefix.radix_key import IndexMisuse
from mlx_audit.prefix.reasons import Reason
from prefix.naive import Blob
from prefix.pools import N, blob, everything, filled, keys


def test_a_leaf_of_several_entries_counts_once_until_the_last_one_goes() -> None:
    index: PrefixIndex[Blob] = PrefixIndex(100)
    one = index.insert(N, [1], Blob(1, (("a", 10), ("b", 5)))).entry
    two = index.insert(N, [2], Blob(2, (("b", 5), ("c", 1), ("c", 1)))).entry
    assert one is not None
    assert two is not None
    assert (one.nbytes, two.nbytes, index.nbytes) == (15, 6, 16)
    index.remove(one)
    assert index.nbytes == 6
    index.check()
    index.remove(two)
    assert index.nbytes == 0
    index.check()


def test_evicting_what_shares_all_its_leaves_makes_no_room() -> None:
    index: PrefixIndex[Blob] = PrefixIndex(12)
    index.insert(N, [1], Blob(1, (("a", 5),)))
    index.insert(N, [2], Blob(2, (("a", 5), ("b", 5))))
    inserted = index.insert(N, [3], Blob(3, (("c", 7),)))
    assert [entry.payload.name for entry in inserted.evicted] == [1, 2]
    assert (keys(index), index.nbytes) == ([[3]], 7)


def test_outputs_go_first_then_checkpoints_then_prompts_and_within_a_kind_the_oldest() -> None:
    index: PrefixIndex[Blob] = PrefixIndex(6)
    filled(index, "prompt", "output", "checkpoint", "prompt", "output", "checkpoint")
    assert keys(index) == [[1], [4], [2], [5], [0], [3]]
    index.boundary(N, [1, 9])
    index.boundary(N, [0, 9])
    gone = []
    for number in range(10, 16):
        inserted = index.insert(N, [number], blob(1, first=number))
        gone += [entry.leaves for entry in inserted.evicted]
        index.check()
    assert gone == [{f"leaf {1000 + number}": 1} for number in (4, 1, 2, 5, 3, 0)]


def test_a_new_output_is_not_the_first_to_go_for_its_own_room() -> None:
    index: PrefixIndex[Blob] = PrefixIndex(100, max_entries=2)
    filled(index, "prompt", "prompt")
    inserted = index.insert(N, [7], blob(1), EntryKind.OUTPUT)
    assert inserted.entry is not None
    assert keys(index) == [[7], [1]]
    index.insert(N, [8], blob(1), EntryKind.OUTPUT)
    assert keys(index) == [[8], [1]]


def test_what_was_used_last_stays() -> None:
    index: PrefixIndex[Blob] = PrefixIndex(100, max_entries=2)
    first, _ = filled(index, "prompt", "prompt")
    with index.lease(first):
        pass
    index.insert(N, [2], blob(1))
    assert keys(index) == [[0], [2]]


@pytest.mark.parametrize("lookup", ["boundary", "descendant"])
def test_a_lookup_refreshes_its_answer_and_nothing_else(lookup: str) -> None:
    index: PrefixIndex[Blob] = PrefixIndex(100)
    index.insert(N, [1], blob(1))
    index.insert(N, [1, 2], blob(1))
    index.insert(N, [3], blob(1))
    before = index.tree()
    assert getattr(index, lookup)(N, [1, 2, 9]).matched == 2
    assert keys(index) == [[1], [3], [1, 2]]
    assert index.tree() == before
    assert (index.stats.hits, index.stats.misses) == (0, 0)


def test_replacing_at_capacity_costs_no_other_entry() -> None:
    index: PrefixIndex[Blob] = PrefixIndex(3, max_entries=3)
    entries = filled(index, "prompt", "prompt", "prompt")
    inserted = index.insert(N, [1], blob(1, first=50))
    assert inserted.evicted == ()
    assert entries[1].left == "replaced"
    assert (keys(index), index.nbytes) == ([[0], [2], [1]], 3)


def test_two_hundred_conversations_stay_within_the_budget_and_keep_prompts() -> None:
    index: PrefixIndex[Blob] = PrefixIndex(20 * 7)
    for turn in range(200):
        prompt = [5, 5, turn, turn + 1]
        index.insert(N, prompt, blob(7, first=2 * turn), EntryKind.PROMPT)
        index.insert(N, [*prompt, 1, 2, 3], blob(7, first=2 * turn + 1), EntryKind.OUTPUT)
        index.check()
        unique = {leaf: size for _, entry in index.items() for leaf, size in entry.leaves.items()}
        assert index.nbytes == sum(unique.values()) <= 140
        assert index.stats.nodes <= 2 * len(index) + 1
    assert [entry.kind.value for _, entry in index.items()] == ["output"] + ["prompt"] * 19


def test_shorter_prefixes_are_superseded_only_when_the_caller_says_so() -> None:
    ids = list(range(40))
    index: PrefixIndex[Blob] = PrefixIndex(100)
    index.insert(N, ids[:20], blob(1, first=1))
    index.insert(N, ids, blob(1, first=2))
    assert keys(index) == [ids[:20], ids]
    index.insert(N, [*ids[:20], 99], blob(1, first=3))
    held = index.boundary(N, ids[:25])
    assert held is not None
    with index.lease(held.entry):
        index.insert(N, ids, blob(1, first=4), supersede=True)
        assert len(keys(index)) == 3
    index.insert(N, ids, blob(1, first=5), supersede=True)
    assert keys(index) == [[*ids[:20], 99], ids]
    assert held.entry.left == "superseded"
    assert index.stats.left == {"replaced": 2, "superseded": 1}


def test_room_that_superseding_makes_costs_no_other_entry() -> None:
    index: PrefixIndex[Blob] = PrefixIndex(100, max_entries=2)
    index.insert(N, [9], blob(1, first=1))
    index.insert(N, [1], blob(1, first=2))
    inserted = index.insert(N, [1, 2], blob(1, first=3), supersede=True)
    assert (inserted.evicted, keys(index)) == ((), [[9], [1, 2]])


def test_a_leased_entry_is_never_evicted_and_too_little_room_changes_nothing() -> None:
    index: PrefixIndex[Blob] = PrefixIndex(100, max_entries=2)
    first, second = filled(index, "output", "prompt")
    with index.lease(first) as held:
        assert held is first
        inserted = index.insert(N, [7], blob(1))
        assert inserted.evicted == (second,)
        with index.lease(index.items()[1][1]):
            before = everything(index)
            refused = index.insert(N, [8], blob(1))
            assert (refused.entry, refused.reason) == (None, Reason.LEASED)
            assert everything(index) == before
    assert index.insert(N, [8], blob(1)).evicted == (first,)
    assert index.stats.leases == 0


@pytest.mark.parametrize("way", ["replace", "clear", "remove"])
def test_a_leased_entry_that_leaves_stays_for_its_holders_and_is_counted_till_the_last(way: str) -> None:
    index: PrefixIndex[Blob] = PrefixIndex(12)
    (entry,) = filled(index, "prompt", size=10)
    with index.lease(entry):
        with index.lease(entry) as held:
            if way == "replace":
                assert index.insert(N, [0], blob(2)).entry is not None
            else:
                assert index.clear() == 1 if way == "clear" else index.remove(entry)
            assert held is not None
            assert held.payload.sizes == (("leaf 1000", 10),)
            assert held.left == {"replace": "replaced", "clear": "cleared", "remove": "removed"}[way]
            index.check()
        new = 2 if way == "replace" else 0
        assert (index.nbytes, index.stats.detached, len(index)) == (10 + new, 1, new // 2)
        assert index.insert(N, [5], blob(3, first=9)).reason == Reason.LEASED
        with index.lease(entry) as nothing:
            assert nothing is None
        assert entry.leases == 1
        assert index.tokens_of(entry) is None
        index.check()
    assert (index.nbytes, index.stats.detached, index.stats.leases) == (new, 0, 0)
    index.check()


def test_replacing_a_leased_entry_needs_room_for_both() -> None:
    index: PrefixIndex[Blob] = PrefixIndex(12)
    (entry,) = filled(index, "prompt", size=10)
    with index.lease(entry):
        before = everything(index)
        assert index.insert(N, [0], blob(3)).reason == Reason.LEASED
        assert everything(index) == before
    assert index.insert(N, [0], blob(3)).entry is not None
    assert index.nbytes == 3


def test_a_lease_ends_when_its_block_fails() -> None:
    index: PrefixIndex[Blob] = PrefixIndex(12)
    (entry,) = filled(index, "prompt")
    for error in (ValueError, KeyboardInterrupt, GeneratorExit):
        with pytest.raises(error), index.lease(entry):
            raise error(str(entry.leases))
    assert entry.leases == 0
    assert index.stats.hits == 3


def test_a_request_that_is_cancelled_lets_its_lease_go() -> None:
    index: PrefixIndex[Blob] = PrefixIndex(12)
    (entry,) = filled(index, "prompt")

    def request() -> Iterable[int]:
        with index.lease(entry):
            yield from range(5)

    stream = iter(request())
    next(stream)
    assert entry.leases == 1
    stream.close()  # type: ignore[attr-defined]
    assert entry.leases == 0


def test_trim_to_evicts_by_the_same_rule_and_leaves_what_is_leased() -> None:
    index: PrefixIndex[Blob] = PrefixIndex(100)
    entries = filled(index, "prompt", "output", "prompt", "checkpoint", size=2)
    assert index.trim_to() == ()
    assert index.trim_to(max_bytes=7) == (entries[1],)
    with index.lease(entries[3]):
        assert index.trim_to(max_entries=2) == (entries[0],)
        assert index.trim_to(max_bytes=0) == (entries[2],)
        assert keys(index) == [[3]]
    assert index.trim_to(max_entries=-3) == (entries[3],)
    assert (len(index), index.nbytes, index.stats.evictions) == (0, 0, 4)


def test_the_counts_tell_hits_misses_and_each_refusal() -> None:
    index: PrefixIndex[Blob] = PrefixIndex(100)
    (entry,) = filled(index, "prompt")
    with index.lease(entry):
        assert index.stats.leases == 1
    for reason in ("miss", Reason.MISS, Reason.WRAPPED_RING, "wrapped-ring"):
        index.count_refusal(reason)
    stats = index.stats
    assert (stats.hits, stats.misses, stats.refusals) == (1, 2, {"wrapped-ring": 2})
    assert (stats.entries, stats.nbytes, stats.nodes, stats.edge_bytes, stats.insertions) == (1, 1, 2, 4, 1)
    index.clear()
    assert (stats.entries, index.stats.entries) == (1, 0)


def test_a_lease_that_is_released_twice_is_refused() -> None:
    pool: EntryPool[Blob, str] = EntryPool(10)
    entry = Entry(N, 1, EntryKind.PROMPT, blob(1), {"leaf": 1})
    pool.add(entry, "place")
    pool.lease(entry)
    pool.release(entry)
    with pytest.raises(IndexMisuse, match="released more often than leased"):
        pool.release(entry)
    pool.check()
