"""A path-compressed radix tree over token ids, with one root for each namespace.

An edge is the packed ids between two branch points, so memory grows with the unique tokens, and a lookup compares
memory instead of visiting tokens. Only `insert` splits an edge and only `remove` joins two; lookups change nothing.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Generic, NamedTuple

from mlx_audit.prefix.radix_check import check_tree
from mlx_audit.prefix.radix_key import WIDTH, IndexMisuse, TokenKey, Tokens, common_length, token_at
from mlx_audit.prefix.radix_node import Found, RadixNode, RadixRoot, V, age, latest_first, to_join


class _Walk(NamedTuple, Generic[V]):
    """What a query leads to: nodes wholly on it with their depths, bytes matched, and the node at or below that."""

    path: list[tuple[RadixNode[V], int]]
    matched: int
    below: RadixNode[V] | None


class RadixTree(Generic[V]):
    """Values under token prefixes. Keys of two namespaces share nothing; a namespace is opaque bytes.

    Not locked: `PrefixIndex` does that.

    Attributes:
        nodes: Nodes, roots included; at most twice the entries.
        entries: Nodes that have a value.
        edge_bytes: Bytes of all edges.
    """

    def __init__(self) -> None:
        self.roots: dict[bytes, RadixRoot[V]] = {}
        self.nodes = self.entries = self.edge_bytes = 0
        self._clock = itertools.count(1)

    def __len__(self) -> int:
        return self.entries

    def __repr__(self) -> str:
        return (
            f"<RadixTree {self.entries:,} entries, {self.nodes:,} nodes, {self.edge_bytes:,} edge bytes, "
            f"{len(self.roots):,} namespaces>"
        )

    def find(self, namespace: bytes, tokens: Tokens) -> RadixNode[V] | None:
        """The node of exactly this key, or None where it has no entry."""
        data = TokenKey(tokens).data
        walk = self._walk(namespace, data, len(data))
        if walk.path and walk.path[-1][1] == len(data) and walk.path[-1][0].value is not None:
            return walk.path[-1][0]
        return None

    def boundaries(
        self, namespace: bytes, tokens: Tokens, at_most: int | None = None
    ) -> tuple[Found[V], ...]:
        """All entries whose whole key is a prefix of the query, deepest first; none longer than `at_most` tokens."""
        data, limit = _limited(tokens, at_most)
        path = self._walk(namespace, data, limit).path
        return tuple(Found(node, depth // WIDTH) for node, depth in reversed(path) if node.value is not None)

    def boundary(self, namespace: bytes, tokens: Tokens, at_most: int | None = None) -> Found[V] | None:
        """The deepest entry whose whole key is a prefix of the query."""
        return next(iter(self.boundaries(namespace, tokens, at_most)), None)

    def descendants(
        self, namespace: bytes, tokens: Tokens, at_most: int | None = None, limit: int = 1
    ) -> tuple[Found[V], ...]:
        """Up to `limit` entries that share the longest prefix of the query that any entry shares, latest first.

        The shared length is the same for all of them, at most `at_most`. An entry's own key may end there or go on
        beyond it, so it serves only where a stack can be trimmed exactly. Empty where not one token is shared.
        """
        data, end = _limited(tokens, at_most)
        walk = self._walk(namespace, data, end)
        if walk.below is None or not walk.matched:
            return ()
        nodes = itertools.islice(latest_first(walk.below), limit)
        return tuple(Found(node, walk.matched // WIDTH) for node in nodes)

    def descendant(self, namespace: bytes, tokens: Tokens, at_most: int | None = None) -> Found[V] | None:
        """The latest entry that shares the longest prefix of the query that any entry shares."""
        return next(iter(self.descendants(namespace, tokens, at_most)), None)

    def insert(self, namespace: bytes, tokens: Tokens, value: V) -> RadixNode[V]:
        """Put a value under a key, in place of any that is there, and return its node.

        Raises:
            IndexMisuse: The key is empty, or the value None.
        """
        data = TokenKey(tokens).data
        if not data or value is None:
            found = "None as value" if data else "no tokens"
            raise IndexMisuse("an entry needs at least one token, and a value", where="insert", found=found)
        node = self._node_at(namespace, data)
        self.entries += node.value is None
        node.value = value
        self.touch(node)
        return node

    def touch(self, node: RadixNode[V]) -> None:
        """Make an entry the latest."""
        node.stamp = next(self._clock)
        above: RadixNode[V] | None = node
        while above is not None:
            above.latest = node.stamp
            above = above.parent

    def remove(self, node: RadixNode[V]) -> V:
        """Take an entry out and give its value; nodes that are no longer needed go too.

        Raises:
            IndexMisuse: The node has no entry.
        """
        value, parent = node.value, node.parent
        if value is None or parent is None:
            raise IndexMisuse(
                "the node has no entry", where="remove", found=node, allowed="a node of this tree"
            )
        joint = to_join(node, parent)
        gone, node.value, node.stamp = node.stamp, None, 0
        self.entries -= 1
        lowest = node if node.children else self._dropped(node, parent)
        if joint is not None:
            lowest = self._joined(*joint)
        if isinstance(lowest, RadixRoot) and not lowest.children:
            del self.roots[lowest.namespace]
            self.nodes -= 1
        age(lowest, gone)
        return value

    def check(self) -> None:
        """Raise AssertionError, naming what is broken, unless all invariants of the tree hold."""
        check_tree(self)

    def key(self, node: RadixNode[V]) -> TokenKey:
        """All tokens from the root to a node."""
        edges: list[bytes] = []
        above: RadixNode[V] | None = node
        while above is not None:
            edges.append(above.edge)
            above = above.parent
        return TokenKey.of_bytes(b"".join(reversed(edges)))

    def __iter__(self) -> Iterator[RadixNode[V]]:
        """All nodes, a parent before its children, in order of namespace and token id."""
        for _, root in sorted(self.roots.items()):
            stack: list[RadixNode[V]] = [root]
            while stack:
                node = stack.pop()
                yield node
                stack.extend(node.children[first] for first in sorted(node.children, reverse=True))

    def _walk(self, namespace: bytes, data: bytes, limit: int) -> _Walk[V]:
        """Follow `data[:limit]` from the root, by offset: the query is never sliced."""
        node: RadixNode[V] | None = self.roots.get(namespace)
        path: list[tuple[RadixNode[V], int]] = []
        offset = 0
        while node is not None:
            path.append((node, offset))
            child = node.children.get(token_at(data, offset)) if offset < limit else None
            if child is None:
                break
            end = offset + len(child.edge)
            if end > limit or not data.startswith(child.edge, offset):
                return _Walk(path, offset + common_length(child.edge, data, offset, limit), child)
            node, offset = child, end
        return _Walk(path, offset, node)

    def _node_at(self, namespace: bytes, data: bytes) -> RadixNode[V]:
        """The node at the end of a key, made where there is none. New nodes are complete before they are linked."""
        walk = self._walk(namespace, data, len(data))
        if walk.below is None:
            root: RadixRoot[V] = RadixRoot(namespace)
            leaf = self._leaf(root, data)
            self.roots[namespace] = root
            self.nodes += 1
            return leaf
        node, depth = walk.path[-1]
        rest = data[walk.matched :]
        if walk.below is not node:
            return self._forked(node, walk.below, walk.matched - depth, rest)
        return self._leaf(node, rest) if rest else node

    def _leaf(self, parent: RadixNode[V], edge: bytes) -> RadixNode[V]:
        leaf = RadixNode(edge, parent)
        parent.children[token_at(edge, 0)] = leaf
        self.nodes += 1
        self.edge_bytes += len(edge)
        return leaf

    def _forked(self, parent: RadixNode[V], lower: RadixNode[V], length: int, rest: bytes) -> RadixNode[V]:
        """Cut an edge after `length` bytes, with a leaf for the rest of a key beside what was below the cut.

        The node at the cut has no entry, whatever is below it: a state of n tokens is none of fewer.
        """
        upper, tail = RadixNode(lower.edge[:length], parent), lower.edge[length:]
        upper.latest = lower.latest
        upper.children[token_at(tail, 0)] = lower
        node = self._leaf(upper, rest) if rest else upper
        parent.children[token_at(upper.edge, 0)] = upper
        lower.edge, lower.parent = tail, upper
        self.nodes += 1
        return node

    def _dropped(self, leaf: RadixNode[V], parent: RadixNode[V]) -> RadixNode[V]:
        del parent.children[token_at(leaf.edge, 0)]
        self.nodes -= 1
        self.edge_bytes -= len(leaf.edge)
        return parent

    def _joined(
        self, above: RadixNode[V], middle: RadixNode[V], below: RadixNode[V], edge: bytes
    ) -> RadixNode[V]:
        above.children[token_at(middle.edge, 0)] = below
        below.edge, below.parent = edge, above
        self.nodes -= 1
        return above


def _limited(tokens: Tokens, at_most: int | None) -> tuple[bytes, int]:
    data = TokenKey(tokens).data
    return data, len(data) if at_most is None else max(0, min(len(data), at_most * WIDTH))
