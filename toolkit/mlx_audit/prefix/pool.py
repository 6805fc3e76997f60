"""Entries and what they cost: bytes of unique leaves, leases, and who goes first when room is needed.

Several entries may hold the same leaf (a copied array shares its memory until it is written to). A leaf counts once,
from the first entry that holds it until the last one lets it go.
"""

from __future__ import annotations

import enum
import itertools
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Iterator, Mapping
from typing import Generic, Protocol, TypeVar

from mlx_audit.prefix.radix_check import require
from mlx_audit.prefix.radix_key import IndexMisuse

Leaves = Mapping[Hashable, int]
"""Bytes of each leaf, by an identity that no other leaf has while an entry holds it."""


class Payload(Protocol):
    """What an entry holds."""

    @property
    def leaves(self) -> Iterable[tuple[Hashable, int]]:
        """Identity and bytes of each leaf; the same leaf may come more than once."""
        ...


P = TypeVar("P", bound=Payload)
W = TypeVar("W")


class EntryKind(enum.StrEnum):
    """Where an entry was taken, in the order in which entries are evicted.

    Prompt plus output is asked for only by the next turn of the same conversation; a checkpoint inside a prefill can
    be made again from an earlier boundary; prompt boundaries are what others share.
    """

    OUTPUT = "output"
    CHECKPOINT = "checkpoint"
    PROMPT = "prompt"


class Entry(Generic[P]):
    """One stored prefix.

    Attributes:
        namespace: Fingerprint of everything that must match.
        length: Tokens of its key.
        kind: Where it was taken.
        payload: The snapshot.
        leaves: Bytes of its leaves by identity, as they were at insertion.
        leases: How many holders it has now; above 0 it is not evicted.
        left: Why it is no longer in the index (`evicted`, `superseded`, `replaced`, `removed`, `cleared`), or None.
    """

    __slots__ = ("kind", "leases", "leaves", "left", "length", "namespace", "payload")

    def __init__(self, namespace: bytes, length: int, kind: EntryKind, payload: P, leaves: Leaves) -> None:
        self.namespace = namespace
        self.length = length
        self.kind = kind
        self.payload = payload
        self.leaves = leaves
        self.leases = 0
        self.left: str | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of its unique leaves; other entries may share them."""
        return sum(self.leaves.values())

    def __repr__(self) -> str:
        state = self.left or ("leased" if self.leases else "stored")
        return f"<Entry {self.kind.value} {self.length:,} tokens, {self.nbytes:,} bytes, {state}>"


class Ledger:
    """How many entries hold each leaf, and the bytes of the leaves that any entry holds."""

    def __init__(self, base: Ledger | None = None) -> None:
        """An empty ledger, or with `base` a trial: what would be, with the base unchanged."""
        self._base = base
        self._counts: dict[Hashable, int] = {}
        self._sizes: dict[Hashable, int] = {}
        self.nbytes: int = base.nbytes if base is not None else 0

    def count(self, leaf: Hashable) -> int:
        """Holders of a leaf."""
        if leaf in self._counts or self._base is None:
            return self._counts.get(leaf, 0)
        return self._base.count(leaf)

    def size(self, leaf: Hashable) -> int | None:
        """Bytes of a leaf that is held, or None."""
        return self._sizes.get(leaf)

    def add(self, leaves: Leaves) -> None:
        """One more entry holds these."""
        for leaf, nbytes in leaves.items():
            before = self.count(leaf)
            self._counts[leaf] = before + 1
            if not before:
                self.nbytes += nbytes
                self._sizes[leaf] = nbytes

    def drop(self, leaves: Leaves) -> None:
        """One entry fewer holds these."""
        for leaf, nbytes in leaves.items():
            after = self._counts[leaf] = self.count(leaf) - 1
            if after:
                continue
            self.nbytes -= nbytes
            if self._base is None:
                del self._counts[leaf], self._sizes[leaf]

    def __repr__(self) -> str:
        return f"<Ledger {len(self._counts):,} leaves, {self.nbytes:,} bytes>"


class EntryPool(Generic[P, W]):
    """Entries with the place of each in the index, within a budget.

    Room is made by this rule: entries that are leased stay; of the others those of kind `output` go first, then
    `checkpoint`, then `prompt`, within a kind the least recently used first. The entry that needs the room is new,
    and is not among them.

    An entry that leaves the index while it is leased stays alive for its holder. Its bytes count against the budget
    until the last lease ends; it no longer counts as an entry.
    """

    def __init__(self, max_bytes: int, max_entries: int | None = None) -> None:
        for name, value in (("max_bytes", max_bytes), ("max_entries", max_entries)):
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise IndexMisuse(
                    "a limit is not usable", where=name, found=value, allowed="an integer from 1"
                )
        self.max_bytes = max_bytes
        self.max_entries = max_entries
        self._ledger = Ledger()
        self._places: dict[EntryKind, OrderedDict[Entry[P], W]] = {kind: OrderedDict() for kind in EntryKind}
        self._detached: dict[Entry[P], None] = {}

    def __len__(self) -> int:
        return sum(map(len, self._places.values()))

    def __iter__(self) -> Iterator[Entry[P]]:
        """Entries in the order in which they would go, leased ones included."""
        return itertools.chain.from_iterable(self._places.values())

    def __repr__(self) -> str:
        return f"<EntryPool {len(self):,} entries, {self.nbytes:,} of {self.max_bytes:,} bytes>"

    @property
    def nbytes(self) -> int:
        """Bytes of all unique leaves that are held, by leased entries outside the index too."""
        return self._ledger.nbytes

    @property
    def detached(self) -> tuple[Entry[P], ...]:
        """Entries that have left the index and are still leased."""
        return tuple(self._detached)

    @property
    def leases(self) -> int:
        """Leases now held."""
        return sum(entry.leases for entry in itertools.chain(self, self._detached))

    def place(self, entry: Entry[P]) -> W | None:
        """Where the index keeps an entry, or None when it has left."""
        return self._places[entry.kind].get(entry)

    def conflict(self, leaves: Leaves) -> Hashable | None:
        """A leaf that is held with another number of bytes, or None."""
        return next(
            (leaf for leaf, size in leaves.items() if self._ledger.size(leaf) not in (None, size)), None
        )

    def victims(
        self,
        leaves: Leaves,
        leaving: Iterable[Entry[P]],
        max_bytes: int,
        max_entries: int | None,
        new: int = 1,
    ) -> list[Entry[P]] | None:
        """Which entries must go for `new` entries with these leaves, when `leaving` go anyway; changes nothing.

        None where there would be too little room even without all that may go.
        """
        trial, gone = Ledger(self._ledger), set(leaving)
        trial.add(leaves)
        for old in gone:
            if not old.leases:
                trial.drop(old.leaves)
        count = len(self) + new - len(gone)
        chosen: list[Entry[P]] = []
        candidates = (entry for entry in self if not entry.leases and entry not in gone)
        while trial.nbytes > max_bytes or (max_entries is not None and count > max_entries):
            entry = next(candidates, None)
            if entry is None:
                return None
            chosen.append(entry)
            trial.drop(entry.leaves)
            count -= 1
        return chosen

    def add(self, entry: Entry[P], place: W) -> None:
        """Take an entry in, as the most recently used of its kind."""
        self._places[entry.kind][entry] = place
        self._ledger.add(entry.leaves)

    def remove(self, entry: Entry[P], why: str) -> W:
        """Let an entry go and return its place; where it is leased, its bytes stay counted until it is released."""
        place = self._places[entry.kind].pop(entry)
        entry.left = why
        if entry.leases:
            self._detached[entry] = None
        else:
            self._ledger.drop(entry.leaves)
        return place

    def touch(self, entry: Entry[P]) -> None:
        """Make an entry the most recently used of its kind."""
        self._places[entry.kind].move_to_end(entry)

    def lease(self, entry: Entry[P]) -> None:
        """One more holder."""
        entry.leases += 1

    def release(self, entry: Entry[P]) -> None:
        """One holder fewer; the last one of an entry that has left lets its bytes go."""
        if entry.leases < 1:
            raise IndexMisuse("an entry is released more often than leased", where="release", found=entry)
        entry.leases -= 1
        if not entry.leases and entry in self._detached:
            del self._detached[entry]
            self._ledger.drop(entry.leaves)

    def check(self) -> None:
        """Raise AssertionError, naming what is broken, unless counts and bytes are what the entries say."""
        holders: dict[Hashable, int] = {}
        sizes: dict[Hashable, int] = {}
        for entry in itertools.chain(self, self._detached):
            for leaf, nbytes in entry.leaves.items():
                holders[leaf] = holders.get(leaf, 0) + 1
                sizes[leaf] = nbytes
        counted = {leaf: self._ledger.count(leaf) for leaf in holders}
        require(counted == holders, self, "holders of leaves are counted wrong")
        require(self.nbytes == sum(sizes.values()), self, f"the leaves have {sum(sizes.values())} bytes")
        require(self.nbytes <= self.max_bytes, self, "the budget is exceeded")
        allowed = self.max_entries is None or len(self) <= self.max_entries
        require(allowed, self, f"more than {self.max_entries} entries")
        for entry in self._detached:
            require(entry.leases > 0 and entry.left is not None, entry, "an entry is kept that nobody holds")
        require(all(entry.left is None for entry in self), self, "an entry is stored that has left")


def leaves_of(payload: Payload) -> dict[Hashable, int]:
    """Bytes of a payload's leaves by identity, each leaf once.

    Raises:
        IndexMisuse: A leaf has no usable number of bytes, or two different ones.
    """
    leaves: dict[Hashable, int] = {}
    for leaf, nbytes in payload.leaves:
        usable = isinstance(nbytes, int) and not isinstance(nbytes, bool) and nbytes >= 0
        if not usable or leaves.setdefault(leaf, nbytes) != nbytes:
            raise IndexMisuse(
                "a leaf has no usable size, or two", where=f"leaf {leaf!r}", found=nbytes, allowed="its bytes"
            )
    return leaves
