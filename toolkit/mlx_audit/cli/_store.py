"""A store of prefixes as data and as text: its tree, entries, caches and fingerprint."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlx_audit.cli._render import human_bytes
from mlx_audit.errors import clean
from mlx_audit.prefix.fingerprint import Fingerprint
from mlx_audit.prefix.radix import RadixTree
from mlx_audit.prefix.radix_key import WIDTH, TokenKey, abbreviated
from mlx_audit.prefix.radix_node import RadixNode
from mlx_audit.prefix.rules import refusal
from mlx_audit.prefix.store import StoredEntry, read_manifest
from mlx_audit.prefix.store_body import require_size
from mlx_audit.prefix.store_format import FORMAT

if TYPE_CHECKING:
    from rich.console import Console

_DIGITS = 12
"""Of a digest, for people."""

_LEVELS = 16
_WIDEST = 72
"""Columns of the tree; what is wider pushes its own line out."""


@dataclass(frozen=True)
class Inspected:
    """A store that was looked at without a model: whose it is, nobody was asked.

    Attributes:
        folder: Where it is.
        parts: The fingerprint's fields, each as a digest.
        entries: Least recently used first, as they were saved.
        tree: Their keys, each with its number.
        verified: Whether every byte was compared with its checksum; else sizes and the manifest alone were.
    """

    folder: Path
    parts: Mapping[str, str]
    entries: Sequence[StoredEntry]
    tree: RadixTree[int]
    verified: bool


def look(folder: Path, *, verify: bool) -> Inspected:
    """Read a store.

    Raises:
        PrefixRefused: format-version, unknown-field, unknown-class, damaged, position-mismatch, too-large.
    """
    parts, stated = read_manifest(folder)
    entries = [StoredEntry(folder / one.body, one.tokens, one.size, one.layers) for one in stated]
    tree: RadixTree[int] = RadixTree()
    for number, entry in enumerate(entries, start=1):
        require_size(entry.path, entry.size)
        if verify:
            entry.verify()
        tree.insert(b"", TokenKey.of_bytes(entry.tokens), number)
    return Inspected(folder, parts, entries, tree, verify)


def as_dict(store: Inspected) -> dict[str, Any]:
    """Return what `--json` writes."""
    return {
        "schema": "mlx-audit/prefix-inspection/1",
        "store": str(store.folder),
        "format": FORMAT,
        "verified": store.verified,
        "fingerprint": {
            name: None if _absent(store, name) else digest for name, digest in store.parts.items()
        },
        "memory_bytes": sum(entry.nbytes for entry in store.entries),
        "file_bytes": sum({entry.path: entry.size for entry in store.entries}.values()),
        "nodes": len(list(_nodes(store.tree))),
        "entries": [_entry(number, entry) for number, entry in enumerate(store.entries, start=1)],
        "tree": [
            {"depth": depth, "length": length, "edge": abbreviated(node.edge), "entry": node.value}
            for node, depth, length in _nodes(store.tree)
        ],
        "counts": None,
    }


def show(console: Console, store: Inspected) -> None:
    """Print a store: what it holds, whose it is, and its tree."""
    from rich.text import Text

    for line, style in _lines(store):
        console.print(Text(line, style), soft_wrap=not console.is_terminal)


def _lines(store: Inspected) -> Iterator[tuple[str, str]]:
    memory = human_bytes(sum(entry.nbytes for entry in store.entries))
    files = human_bytes(sum({entry.path: entry.size for entry in store.entries}.values()))
    seal = "every checksum verified" if store.verified else "sizes compared; --verify reads every byte"
    noun = "entry" if len(store.entries) == 1 else "entries"
    yield f"{len(store.entries):,} {noun}, {memory} in memory, {files} of files; {seal}", "bold"
    yield f"format {FORMAT}", "dim"
    stated = [name for name in store.parts if not _absent(store, name)]
    width = max((len(clean(name)) for name in stated), default=0)
    for name in stated:
        yield f"  {clean(name).ljust(width)}  {clean(store.parts[name][:_DIGITS])}", ""
    absent = [name for name in store.parts if _absent(store, name)]
    if absent:
        yield f"  not stated: {', '.join(map(clean, absent))}", "dim"
    yield "", ""
    yield from _drawn(store)
    yield "", ""
    yield "hits and refusals are not stored: PrefixCache.stats() counts them while it runs", "dim"


def _drawn(store: Inspected) -> Iterator[tuple[str, str]]:
    """Yield the tree, a line a node; an entry says how long it is, what it holds, and where it may be taken up."""
    nodes = list(_nodes(store.tree))
    heads = list(_heads(nodes))
    column = min(max(map(len, heads), default=0), _WIDEST)
    for (node, _, length), head in zip(nodes, heads, strict=True):
        if node.value is None:
            yield f"{head.ljust(column)}    {length:>7,}", "dim"
            continue
        entry = store.entries[node.value - 1]
        told = f"{length:>7,} tokens  {human_bytes(entry.nbytes):>7}  {_kinds(entry)}  {_cuts(entry)}"
        yield f"{head.ljust(column)}  ● {told}", ""


def _heads(nodes: Sequence[tuple[RadixNode[int], int, int]]) -> Iterator[str]:
    """Yield each node's edge below lines that lead to it; of a deep one only the nearest levels are drawn."""
    last = _last_children(nodes)
    open_above: list[bool] = []
    for index, (node, depth, _) in enumerate(nodes):
        del open_above[depth:]
        stems = "".join("│  " if more else "   " for more in open_above[-_LEVELS:])
        far = f"{depth:,} levels down " if depth > _LEVELS else ""
        open_above.append(not last[index])
        yield f"{stems}{'└─ ' if last[index] else '├─ '}{far}{abbreviated(node.edge)}"


def _nodes(tree: RadixTree[int]) -> Iterator[tuple[RadixNode[int], int, int]]:
    """Yield each node below the root with its depth and the tokens up to its end, a parent before its children."""
    for root in tree.roots.values():
        waiting = [(root.children[first], 0, 0) for first in sorted(root.children, reverse=True)]
        while waiting:
            node, depth, above = waiting.pop()
            length = above + len(node.edge) // WIDTH
            yield node, depth, length
            below = sorted(node.children, reverse=True)
            waiting += [(node.children[first], depth + 1, length) for first in below]


def _last_children(nodes: Sequence[tuple[RadixNode[int], int, int]]) -> list[bool]:
    """Return, for each node, whether no sibling comes after it."""
    found, after = [True] * len(nodes), set[int]()
    for index in range(len(nodes) - 1, -1, -1):
        depth = nodes[index][1]
        found[index] = depth not in after
        after = {other for other in after if other <= depth} | {depth}
    return found


def _entry(number: int, entry: StoredEntry) -> dict[str, Any]:
    refused = refusal(entry.layers, 1) if entry.position > 1 else None
    return {
        "number": number,
        "tokens": entry.position,
        "key": abbreviated(entry.tokens),
        "body": entry.path.name,
        "file_bytes": entry.size,
        "memory_bytes": entry.nbytes,
        "caches": dict(_counted(entry)),
        "positions": sorted({layer.position for layer in entry.layers}),
        "shorter": None if refused is None else {"refused": refused.reason.value, "where": refused.where},
    }


def _kinds(entry: StoredEntry) -> str:
    return ", ".join(f"{count} × {kind}" for kind, count in _counted(entry).items())


def _counted(entry: StoredEntry) -> Counter[str]:
    """Return how often each kind occurs, parts in place of what they are part of."""
    layers = [part for layer in entry.layers for _, part in layer.walk("layer") if not part.parts]
    return Counter(layer.kind for layer in layers)


def _cuts(entry: StoredEntry) -> str:
    """Say at which prefixes an entry may be taken up."""
    short, long = (
        refusal(entry.layers, at) if entry.position > 1 else None for at in (1, entry.position - 1)
    )
    if short is None:
        return "any prefix"
    return f"{'whole only' if long is not None else 'not every prefix'} ({short.reason.value})"


def _absent(store: Inspected, name: str) -> bool:
    """Return whether a field of the fingerprint was stated as absent."""
    return store.parts[name] == Fingerprint().parts.get(name)
