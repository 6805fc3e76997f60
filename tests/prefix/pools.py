"""Small indices and payloads for tests of the pool."""

from __future__ import annotations

from typing import Any

from mlx_audit.prefix.index import PrefixIndex
from mlx_audit.prefix.pool import Entry, EntryKind
from prefix.naive import Blob

N = b"namespace"


def blob(*sizes: int, first: int = 0) -> Blob:
    """A payload with leaves of these sizes; leaves with the same number are the same."""
    return Blob(0, tuple((f"leaf {first + index}", size) for index, size in enumerate(sizes)))


def filled(index: PrefixIndex[Blob], *kinds: str, size: int = 1) -> list[Entry[Blob]]:
    """An entry of each kind under the keys [0], [1], ...; each has a leaf of its own."""
    entries = []
    for number, kind in enumerate(kinds):
        entry = index.insert(N, [number], blob(size, first=1000 + number), EntryKind(kind)).entry
        assert entry is not None
        entries.append(entry)
    return entries


def keys(index: PrefixIndex[Blob]) -> list[list[int]]:
    """Keys in the order in which they would go."""
    index.check()
    return [list(key) for key, _ in index.items()]


def everything(index: PrefixIndex[Any]) -> Any:
    """All that an insertion may change, but for the count of refusals."""
    stats = index.stats
    held = [(list(key), entry, entry.leases, entry.left, entry.payload) for key, entry in index.items()]
    return held, index.tree(), stats.nbytes, stats.nodes, stats.left, stats.insertions
