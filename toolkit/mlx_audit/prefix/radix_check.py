"""The invariants of a radix tree, checked node by node."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mlx_audit.prefix.radix_key import WIDTH, abbreviated, token_at

if TYPE_CHECKING:
    from mlx_audit.prefix.radix import RadixTree
    from mlx_audit.prefix.radix_node import RadixNode


def check_tree(tree: RadixTree[Any]) -> None:
    """Raise AssertionError, naming the node and what is broken, unless the tree is as it must be."""
    for namespace, root in tree.roots.items():
        require(not root.edge and root.parent is None, root, "a root has an edge or a parent")
        require(root.namespace == namespace, root, "a root stands under another namespace")
        require(bool(root.children), root, "a namespace without entries is left")
    nodes = list(tree)
    for node in nodes:
        for first, child in node.children.items():
            _check_link(node, first, child)
    for node in nodes:
        _check_node(node)
    entries = [node for node in nodes if node.value is not None]
    stamps = {node.stamp for node in entries}
    counts = [
        ("nodes", tree.nodes, len(nodes)),
        ("entries", tree.entries, len(entries)),
        ("edge bytes", tree.edge_bytes, sum(len(node.edge) for node in nodes)),
        ("different stamps", len(stamps), len(entries)),
    ]
    for what, said, counted in counts:
        require(said == counted, tree, f"{said} {what} reported, {counted} counted")
    require(tree.nodes <= 2 * tree.entries + 1, tree, "there are more nodes than two for each entry, and one")


def require(holds: bool, where: object, what: str) -> None:
    """Raise AssertionError unless it holds, also under `python -O`."""
    if not holds:
        raise AssertionError(f"{what}: {where!r}")


def _check_node(node: RadixNode[Any]) -> None:
    if node.parent is not None:
        require(len(node.edge) % WIDTH == 0, node, "an edge ends within a token")
        needed = node.value is not None or len(node.children) > 1
        require(needed, node, "a node has neither an entry nor two children")
    require((node.value is None) == (node.stamp == 0), node, "an entry and its stamp don't agree")
    latest = max([node.stamp, *(child.latest for child in node.children.values())])
    require(node.latest == latest, node, f"the latest stamp below is {latest}, reported as {node.latest}")


def _check_link(node: RadixNode[Any], first: int, child: RadixNode[Any]) -> None:
    require(child.parent is node, child, "a node has another parent than the one that it hangs under")
    require(bool(child.edge), child, "an edge is empty")
    edge = abbreviated(child.edge)
    require(token_at(child.edge, 0) == first, child, f"child {first} has the edge {edge}")
