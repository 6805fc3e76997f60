"""What hides the slots that hold no token: the mask of every attention in a decode step, found in its graph."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from mlx_audit.tracing.graph import Graph, Leaf, Node, Value
from mlx_audit.tracing.primitives import (
    COMPARISONS,
    FUSED,
    JUDGES,
    LOOKUPS,
    PRODUCTS,
    SHAPES,
    WRITES,
    is_own_kernel,
)


@dataclass
class MaskedAttention:
    """How often one kind of cache is attended to, and what masks it."""

    attentions: int
    mask: str


def unmasked_attention(graph: Graph) -> tuple[list[str], dict[str, MaskedAttention]]:
    """Return attentions that the position does not mask over all keys, and what masks each kind of cache.

    The one constant slice of a buffer that is allowed is its prefix `[0:extent]`, the rung.
    """
    found: list[str] = []
    attentions: dict[int, tuple[Node, Leaf, int]] = {}
    for leaf, buffers in _buffers(graph).values():
        readers = [reader for buffer in buffers for reader in _readers(graph, buffer.name, leaf)]
        found += [text for buffer in buffers for text in _cut(graph, leaf, buffer)]
        if not readers:
            found.append(f"{leaf.cache} is written, but no attention reads it over its whole rung")
        attentions |= {id(reader): (reader, leaf, keys) for reader, keys in readers}
    for leaf in [leaf for leaf, _ in _buffers(graph).values() if leaf.slots == leaf.capacity][:1]:
        for node in graph.nodes:
            if node.primitive == "Softmax" and node.inputs[0].shape[-1] in (leaf.extent, leaf.extent + 1):
                attentions.setdefault(id(node), (node, leaf, leaf.extent))
    masks: dict[str, MaskedAttention] = {}
    for index, (node, leaf, keys) in enumerate(attentions.values()):
        mask = _mask_of(graph, node, keys)
        if mask is None:
            found.append(
                f"attention {index} ({node.primitive} over {list(node.inputs[0].shape)}) has no mask that descends "
                "from the position"
            )
        name = f"{leaf.kind} over {keys} keys" + ("" if mask else ", unmasked")
        masks.setdefault(name, MaskedAttention(0, mask or "no mask")).attentions += 1
    return found, masks


def _buffers(graph: Graph) -> dict[str, tuple[Leaf, list[Value]]]:
    """Return the buffers of each cache as a step leaves them, without those that hold nothing."""
    found: dict[str, tuple[Leaf, list[Value]]] = {}
    for leaf, before, after in graph.state():
        if leaf.role == "buffer" and not graph.is_unused(before, after):
            found.setdefault(leaf.cache, (leaf, []))[1].append(after)
    return found


def _readers(graph: Graph, name: str, leaf: Leaf) -> Iterator[tuple[Node, int]]:
    """Yield what turns a buffer's scores into weights or choices, and over how many keys.

    It is reached through exactly one matrix product. A gather by chosen indices (of the best keys) makes them fewer.
    """
    waiting, seen = [(name, 0, leaf.extent)], {name}
    while waiting:
        current, products, keys = waiting.pop()
        for node in graph.users.get(current, ()):
            if node.primitive == FUSED or is_own_kernel(node) or (node.primitive in JUDGES and products == 1):
                yield node, keys
                continue
            passed = products + (node.primitive in PRODUCTS)
            chosen = (_chosen(graph, node, current) or _joined(node, current, keys)) if passed == 0 else None
            axes = (leaf.slots, keys, chosen)
            if passed > 1 or node.primitive in JUDGES or (passed == 0 and not _keeps(node, axes)):
                continue
            for output in node.outputs:
                if output.name not in seen:
                    seen.add(output.name)
                    waiting.append((output.name, passed, chosen or keys))


def _chosen(graph: Graph, node: Node, name: str) -> int | None:
    """Return how many slots a gather takes from a buffer by indices that were chosen among scores; None otherwise."""
    if node.primitive not in LOOKUPS or node.inputs[0].name != name:
        return None
    if all(maker.primitive != "ArgPartition" for maker in graph.ancestors(node.inputs[1].name)):
        return None
    axis: int = node.arguments[0] if node.primitive == "GatherAxis" else 0
    return node.outputs[0].shape[axis]


def _joined(node: Node, name: str, keys: int) -> int | None:
    """Return how many keys there are once others were put beside those of a buffer; None otherwise."""
    if node.primitive != "Concatenate":
        return None
    own = next(value for value in node.inputs if value.name == name)
    axis: int = node.arguments[0]
    return node.outputs[0].shape[axis] if own.shape[axis] == keys else None


def _keeps(node: Node, axes: tuple[int | None, ...]) -> bool:
    """Return whether a primitive may stand between a buffer and the product that reads it, such as a rotation."""
    return any(axis in output.shape for output in node.outputs for axis in axes)


def _cut(graph: Graph, leaf: Leaf, buffer: Value) -> Iterator[str]:
    """Yield constant slices that cut a buffer's slots, which would hide keys at every other position."""
    waiting, seen = [buffer], {buffer.name}
    while waiting:
        value = waiting.pop()
        for node in graph.users.get(value.name, ()):
            for output in node.outputs:
                # The axis of a ring may be as long as another one, so there only the buffer itself is looked at.
                axis = None if leaf.slots == leaf.capacity else 2 if value is buffer else -1
                if node.primitive == "Slice" and _cuts_slots(node, leaf, axis):
                    yield f"{leaf.cache} is cut to {list(output.shape)} by a constant slice {node.arguments}"
                elif (node.primitive in SHAPES or node.primitive == "Slice") and output.name not in seen:
                    seen.add(output.name)
                    waiting.append(output)


def _cuts_slots(node: Node, leaf: Leaf, axis: int | None) -> bool:
    """Return whether a slice takes anything but all slots of a buffer, or the first of them up to the rung."""
    bounds = enumerate(zip(node.inputs[0].shape, *node.arguments, strict=False))
    return any(
        axis in (None, at)
        and size in (leaf.slots, leaf.extent)
        and (start != 0 or end not in (size, leaf.extent) or stride != 1)
        for at, (size, start, end, stride) in bounds
    )


def _mask_of(graph: Graph, attention: Node, keys: int) -> str | None:
    """Return the mask over all keys, descending from a position, that reaches the attention's scores; None without."""
    where = graph.positions()

    def masks(value: Value) -> bool:
        return keys in value.shape and graph.descends(value.name, where)

    def told(value: Value) -> str:
        compared = {node.primitive for node in graph.ancestors(value.name)} & COMPARISONS
        return f"{value.form} by {', '.join(sorted(compared)) or 'arithmetic'}"

    if is_own_kernel(attention):
        return "stops at the position" if _stops_at_position(graph, attention, where) else None
    if attention.primitive == FUSED:
        return next((told(v) for v in attention.inputs[3:] if masks(v) and len(v.shape) == 4), None)
    waiting, seen = [attention.inputs[0].name], set[str]()
    while waiting:
        node = graph.producer.get(waiting.pop())
        if node is None or node.primitive in PRODUCTS:
            continue
        if node.primitive == "Select" and masks(node.inputs[0]) and node.inputs[0].dtype == "bool":
            return told(node.inputs[0])
        if node.primitive == "Add":
            additive = next((v for v in node.inputs if masks(v) and _is_additive_mask(graph, v)), None)
            if additive is not None:
                return told(additive)
        for value in node.inputs:
            if value.name not in seen:
                seen.add(value.name)
                waiting.append(value.name)
    return None


def _stops_at_position(graph: Graph, kernel: Node, where: list[Value]) -> bool:
    """Return whether the kernel gets, as it came in, the position of the cache whose buffers it reads."""
    if len(kernel.inputs) != 4:
        return False
    sources = []
    for value in kernel.inputs[1:3]:
        while (node := graph.producer.get(value.name)) is not None and node.primitive in WRITES:
            value = node.inputs[0]
        sources.append(next((own.path for own in graph.state_inputs if own.name == value.name), ""))
    position = next((own.path for own in where if own.name == kernel.inputs[3].name), "")
    caches = {path.rsplit(".", 1)[0] for path in (*sources, position)}
    return len(caches) == 1 and caches != {""}


def _is_additive_mask(graph: Graph, value: Value) -> bool:
    """Return whether a value is a float mask: a boolean that was only cast adds 1 and hides nothing."""
    for node in graph.ancestors(value.name):
        if node.primitive in PRODUCTS:
            return False
        if node.primitive in ("Select", "Multiply", "Log") and not node.outputs[0].dtype.startswith(
            ("int", "uint")
        ):
            return True
    return False
