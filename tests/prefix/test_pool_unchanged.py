"""An insertion that cannot be done changes nothing; limits that are none, and pools that are broken, are named."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from mlx_audit.prefix.index import PrefixIndex
from mlx_audit.prefix.pool import Entry, EntryKind, EntryPool, Ledger
from mlx_audit.prefix.radix import RadixTree
from mlx_audit.prefix.radix_key import IndexMisuse
from mlx_audit.prefix.reasons import PrefixRefused, Reason
from prefix.naive import Blob
from prefix.pools import N, blob, everything, filled


def test_what_is_larger_than_the_budget_changes_nothing() -> None:
    index: PrefixIndex[Blob] = PrefixIndex(10)
    filled(index, "prompt", "prompt")
    before = everything(index)
    refused = index.insert(N, [0], blob(5, 6))
    assert (refused.entry, refused.reason) == (None, Reason.TOO_LARGE)
    assert refused.detail == "11 bytes, budget 10"
    assert everything(index) == before
    assert index.insert(N, [0], blob(4, 6)).entry is not None


class Raising:
    """A payload that cannot say its leaves."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    @property
    def leaves(self) -> Iterable[tuple[str, int]]:
        yield "leaf 1", 1
        raise self.error


@pytest.mark.parametrize(
    ("payload", "reason", "said"),
    [
        (Raising(ValueError("no\nleaves")), "payload", "ValueError: no"),
        (Raising(PrefixRefused(Reason.UNKNOWN_CLASS)), Reason.UNKNOWN_CLASS, "unknown-class"),
        (Blob(0, (("a", -1),)), "payload", "leaf 'a'"),
        (Blob(0, (("a", True),)), "payload", "leaf 'a'"),
        (Blob(0, (("a", 1.0),)), "payload", "leaf 'a'"),  # type: ignore[arg-type]
        (Blob(0, (("a", 1), ("a", 2))), "payload", "leaf 'a'"),
        (Blob(0, ((["a"], 1),)), "payload", "unhashable"),  # type: ignore[arg-type]
        (Blob(0, (("leaf 1000", 2),)), "payload", "held with another number of bytes"),
        (object(), "payload", "AttributeError"),
    ],
    ids=[
        "raises",
        "refuses",
        "negative",
        "bool",
        "float",
        "two sizes",
        "unhashable",
        "held otherwise",
        "no payload",
    ],
)
def test_a_payload_that_cannot_say_its_leaves_changes_nothing(payload: Any, reason: str, said: str) -> None:
    index: PrefixIndex[Any] = PrefixIndex(10, max_entries=2)
    filled(index, "prompt", "prompt")
    before = everything(index)
    refused = index.insert(N, [0], payload)
    assert (refused.entry, refused.reason) == (None, reason)
    assert said in refused.detail
    assert everything(index) == before
    assert index.stats.not_inserted == {reason: 1}
    index.check()


def test_an_interrupted_payload_changes_nothing() -> None:
    index: PrefixIndex[Any] = PrefixIndex(10)
    filled(index, "prompt")
    before = everything(index)
    with pytest.raises(KeyboardInterrupt):
        index.insert(N, [0], Raising(KeyboardInterrupt()))
    assert everything(index) == before


@pytest.mark.parametrize(
    ("owner", "method"), [(RadixTree, "insert"), (EntryPool, "victims"), (RadixTree, "_walk")]
)
def test_an_insertion_that_fails_inside_changes_nothing(
    owner: type, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    index: PrefixIndex[Blob] = PrefixIndex(10, max_entries=2)
    filled(index, "prompt", "prompt")
    before = everything(index)

    def fails(*arguments: object, **named: object) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(owner, method, fails)
        with pytest.raises(MemoryError):
            index.insert(N, [7], blob(1))
    assert everything(index) == before
    index.check()


@pytest.mark.parametrize(
    "limits",
    [{"max_bytes": 0}, {"max_bytes": True}, {"max_bytes": 1.5}, {"max_bytes": 9, "max_entries": 0}],
    ids=str,
)
def test_a_limit_is_a_whole_number_from_one(limits: dict[str, Any]) -> None:
    with pytest.raises(IndexMisuse, match=r"a limit is not usable; found: .*; allowed: an integer from 1"):
        PrefixIndex(**limits)


def counts_a_holder_more(pool: EntryPool[Blob, str], ledger: Ledger) -> None:
    ledger.add({"leaf": 3})


def counts_a_byte_more(pool: EntryPool[Blob, str], ledger: Ledger) -> None:
    ledger.nbytes += 1


def lowers_the_budget(pool: EntryPool[Blob, str], ledger: Ledger) -> None:
    pool.max_bytes = 2


def lowers_the_cap(pool: EntryPool[Blob, str], ledger: Ledger) -> None:
    pool.max_entries = 0


def lets_a_stored_entry_leave(pool: EntryPool[Blob, str], ledger: Ledger) -> None:
    next(iter(pool)).left = "evicted"


def keeps_what_nobody_holds(pool: EntryPool[Blob, str], ledger: Ledger) -> None:
    entry = next(iter(pool))
    pool.lease(entry)
    pool.remove(entry, "removed")
    entry.leases = 0


@pytest.mark.parametrize(
    ("breaks", "said"),
    [
        (counts_a_holder_more, "holders of leaves are counted wrong"),
        (counts_a_byte_more, "the leaves have 3 bytes"),
        (lowers_the_budget, "the budget is exceeded"),
        (lowers_the_cap, "more than 0 entries"),
        (lets_a_stored_entry_leave, "an entry is stored that has left"),
        (keeps_what_nobody_holds, "an entry is kept that nobody holds"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_broken_pool_is_named(breaks: Any, said: str) -> None:
    pool: EntryPool[Blob, str] = EntryPool(10)
    pool.add(Entry(N, 1, EntryKind.PROMPT, blob(1), {"leaf": 3}), "place")
    pool.check()
    breaks(pool, pool._ledger)
    with pytest.raises(AssertionError, match=said):
        pool.check()
