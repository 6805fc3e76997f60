"""Nodes of a radix tree: links, recency, and which edges are joined when an entry goes."""

from __future__ import annotations

import heapq
import weakref
from collections.abc import Iterator
from typing import Generic, NamedTuple, TypeVar

from mlx_audit.prefix.radix_key import TokenKey

V = TypeVar("V")


class RadixNode(Generic[V]):
    """A branch point, an entry, or both; the same object from its entry's insertion to its removal.

    Attributes:
        edge: Packed ids between the parent and here; empty at a root only.
        children: The nodes below, by the first id of their edge.
        value: The entry, or None.
        stamp: When the entry was inserted or last touched; 0 without an entry. No two are equal.
        latest: The largest stamp here and below.
    """

    __slots__ = ("__weakref__", "_parent", "children", "edge", "latest", "stamp", "value")

    def __init__(self, edge: bytes, parent: RadixNode[V] | None) -> None:
        self.edge = edge
        self.children: dict[int, RadixNode[V]] = {}
        self.value: V | None = None
        self.stamp = self.latest = 0
        self.parent = parent

    @property
    def parent(self) -> RadixNode[V] | None:
        """The node above, or None at a root."""
        return self._parent() if self._parent is not None else None

    @parent.setter
    def parent(self, node: RadixNode[V] | None) -> None:
        # Weak, so that a tree which nobody holds is freed at once, with the arrays of its entries.
        self._parent = weakref.ref(node) if node is not None else None

    def __repr__(self) -> str:
        return (
            f"<RadixNode {TokenKey.of_bytes(self.edge)!r} value={self.value!r} children={len(self.children)}>"
        )


class RadixRoot(RadixNode[V]):
    """The empty prefix of one namespace."""

    __slots__ = ("namespace",)

    def __init__(self, namespace: bytes) -> None:
        super().__init__(b"", None)
        self.namespace = namespace


class Found(NamedTuple, Generic[V]):
    """A node that has an entry, and how many tokens of the query it shares."""

    node: RadixNode[V]
    matched: int


def to_join(
    node: RadixNode[V], parent: RadixNode[V]
) -> tuple[RadixNode[V], RadixNode[V], RadixNode[V], bytes] | None:
    """What must be joined when an entry goes: the node above, the one that goes, the one below, and their edge.

    Known before anything is changed: the edge may be long, and there may be no memory for it.
    """
    if len(node.children) == 1:
        above, middle = parent, node
        (below,) = node.children.values()
    elif (
        not node.children and parent.value is None and len(parent.children) == 2 and parent.parent is not None
    ):
        above, middle = parent.parent, parent
        below = next(child for child in parent.children.values() if child is not node)
    else:
        return None
    return above, middle, below, middle.edge + below.edge


def age(node: RadixNode[V] | None, gone: int) -> None:
    """Find the latest stamp anew, upwards, as far as the removed one was the latest."""
    while node is not None and node.latest == gone:
        node.latest = max([node.stamp, *(child.latest for child in node.children.values())], default=0)
        node = node.parent


def latest_first(top: RadixNode[V]) -> Iterator[RadixNode[V]]:
    """The entries at and below a node, by their stamps; only what may come next is looked at."""
    # Stamps differ, and no two subtrees of the heap overlap, so nodes are never compared with each other.
    heap: list[tuple[int, RadixNode[V], bool]] = [(-top.latest, top, False)]
    while heap:
        _, node, is_entry = heapq.heappop(heap)
        if is_entry:
            yield node
            continue
        if node.value is not None:
            heapq.heappush(heap, (-node.stamp, node, True))
        for child in node.children.values():
            heapq.heappush(heap, (-child.latest, child, False))
