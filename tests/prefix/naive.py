"""A prefix index as a list of entries, searched from end to end: slow, plain, and what the real one must equal."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

Key = tuple[int, ...]

EVICTED_FIRST = ("output", "checkpoint", "prompt")


@dataclass(frozen=True)
class Blob:
    """A payload with a name, whose leaves are shared with others as the test likes."""

    name: int
    sizes: tuple[tuple[str, int], ...]

    @property
    def leaves(self) -> Iterable[tuple[str, int]]:
        return self.sizes


@dataclass(eq=False)
class Stored:
    """One entry."""

    namespace: bytes
    key: Key
    kind: str
    blob: Blob
    used: int
    leases: int = 0


def shared(one: Key, other: Key) -> int:
    """How many tokens two keys begin with alike."""
    count = 0
    while count < min(len(one), len(other)) and one[count] == other[count]:
        count += 1
    return count


def unique_bytes(entries: Iterable[Stored]) -> int:
    """Bytes of their leaves, each leaf once."""
    return sum({leaf: size for entry in entries for leaf, size in entry.blob.sizes}.values())


class NaiveIndex:
    """What `PrefixIndex` promises, without a tree and without counts that are kept."""

    def __init__(self, max_bytes: int, max_entries: int | None) -> None:
        self.max_bytes, self.max_entries = max_bytes, max_entries
        self.stored: list[Stored] = []
        self.detached: list[Stored] = []
        self.now = 0

    @property
    def nbytes(self) -> int:
        return unique_bytes(self.stored + self.detached)

    @property
    def leases(self) -> int:
        return sum(entry.leases for entry in self.stored + self.detached)

    @property
    def nodes(self) -> int:
        """A node for each key, each point where keys part, and each namespace."""
        prefixes = {
            (entry.namespace, entry.key[:length]) for entry in self.stored for length in self._ends(entry)
        }
        return len(prefixes) + len({entry.namespace for entry in self.stored})

    @property
    def edge_bytes(self) -> int:
        """Four for each different prefix of any length."""
        ends = {(e.namespace, e.key[:length]) for e in self.stored for length in range(1, len(e.key) + 1)}
        return 4 * len(ends)

    def in_order(self, entries: Iterable[Stored]) -> list[Stored]:
        """In the order in which they would go."""
        return sorted(entries, key=lambda entry: (EVICTED_FIRST.index(entry.kind), entry.used))

    def touch(self, entry: Stored) -> None:
        self.now += 1
        entry.used = self.now

    def boundaries(self, namespace: bytes, query: Key, at_most: int | None) -> list[Stored]:
        query = query[:at_most]
        found = [e for e in self.stored if e.namespace == namespace and query[: len(e.key)] == e.key]
        return sorted(found, key=lambda entry: -len(entry.key))

    def descendants(self, namespace: bytes, query: Key, at_most: int | None) -> tuple[int, list[Stored]]:
        query = query[:at_most]
        within = [entry for entry in self.stored if entry.namespace == namespace]
        best = max([shared(entry.key, query) for entry in within], default=0)
        found = [entry for entry in within if best and shared(entry.key, query) == best]
        return best, sorted(found, key=lambda entry: -entry.used)

    def insert(
        self, namespace: bytes, key: Key, blob: Blob, kind: str, supersede: bool
    ) -> tuple[str | None, list[Stored]]:
        """The reason of a refusal or None, and what was evicted."""
        new = Stored(namespace, key, kind, blob, 0)
        if unique_bytes([new]) > self.max_bytes:
            return "too-large", []
        shorter = self.boundaries(namespace, key, None)
        leaving = [e for e in shorter if e.key == key or (supersede and not e.leases)]
        staying = [entry for entry in self.stored if entry not in leaving]
        held = self.detached + [entry for entry in leaving if entry.leases]
        evicted: list[Stored] = []
        for entry in [*self.in_order(e for e in staying if not e.leases), None]:
            if self._fits([*staying, new], held):
                break
            if entry is None:
                return "leased", []
            staying.remove(entry)
            evicted.append(entry)
        self.stored, self.detached = [*staying, new], held
        self.touch(new)
        return None, evicted

    def release(self, entry: Stored) -> None:
        entry.leases -= 1
        self.detached = [e for e in self.detached if e.leases]

    def let_go(self, entries: Iterable[Stored]) -> None:
        for entry in list(entries):
            self.stored.remove(entry)
            self.detached += [entry] if entry.leases else []

    def trim_to(self, max_bytes: int, max_entries: int | None) -> list[Stored]:
        evicted: list[Stored] = []
        for entry in self.in_order(e for e in self.stored if not e.leases):
            many = max_entries is not None and len(self.stored) > max_entries
            if self.nbytes > max_bytes or many:
                self.stored.remove(entry)
                evicted.append(entry)
        return evicted

    def _fits(self, stored: list[Stored], held: list[Stored]) -> bool:
        few = self.max_entries is None or len(stored) <= self.max_entries
        return few and unique_bytes(stored + held) <= self.max_bytes

    def _ends(self, entry: Stored) -> set[int]:
        others = [other for other in self.stored if other is not entry and other.namespace == entry.namespace]
        return {len(entry.key), *(shared(entry.key, other.key) for other in others)} - {0}
