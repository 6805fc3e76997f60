"""What the prefix index answers with: matches, insertions, counts, and its tree for people."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple

from mlx_audit.prefix.pool import Entry, P
from mlx_audit.prefix.radix import RadixTree
from mlx_audit.prefix.radix_key import WIDTH, abbreviated
from mlx_audit.prefix.radix_node import Found, RadixNode


class Match(NamedTuple, Generic[P]):
    """An entry, and how many tokens of the query it shares: all of its key, or fewer where it must be trimmed."""

    entry: Entry[P]
    matched: int


class Inserted(NamedTuple, Generic[P]):
    """What an insertion did.

    Attributes:
        entry: The new entry, or None where nothing was changed.
        reason: Why nothing was changed: `too-large` for the budget, `leased` entries leave no room, or the `payload`
            could not say its leaves; None where the entry is in.
        detail: The reason for people.
        evicted: Entries that went to make room.
    """

    entry: Entry[P] | None
    reason: str | None = None
    detail: str = ""
    evicted: tuple[Entry[P], ...] = ()


@dataclass
class IndexStats:
    """Counts since the index was made, and what it holds now; a copy that no longer changes."""

    hits: int = 0
    misses: int = 0
    refusals: Counter[str] = field(default_factory=Counter)
    insertions: int = 0
    not_inserted: Counter[str] = field(default_factory=Counter)
    left: Counter[str] = field(default_factory=Counter)
    entries: int = 0
    leases: int = 0
    detached: int = 0
    nbytes: int = 0
    nodes: int = 0
    edge_bytes: int = 0

    @property
    def evictions(self) -> int:
        """Entries that went to make room."""
        return self.left["evicted"]


def matches_of(found: tuple[Found[Entry[P]], ...]) -> tuple[Match[P], ...]:
    """The entries of the nodes that a lookup found."""
    return tuple(Match(node.value, matched) for node, matched in found if node.value is not None)


def rows_of(tree: RadixTree[Entry[Any]]) -> list[dict[str, Any]]:
    """One row for each node; `PrefixIndex.tree` says what is in it."""
    rows: list[dict[str, Any]] = []
    for namespace, root in sorted(tree.roots.items()):
        stack: list[tuple[RadixNode[Entry[Any]], int, int]] = [(root, 0, 0)]
        while stack:
            node, depth, above = stack.pop()
            length = above + len(node.edge) // WIDTH
            rows.append({"namespace": namespace.hex(), "depth": depth, "length": length, **_row(node)})
            stack += [
                (node.children[first], depth + 1, length) for first in sorted(node.children, reverse=True)
            ]
    return rows


def _row(node: RadixNode[Entry[Any]]) -> dict[str, Any]:
    entry = node.value
    shown = entry and {"kind": entry.kind.value, "nbytes": entry.nbytes, "leases": entry.leases}
    return {"edge": abbreviated(node.edge), "entry": shown}
