"""What a right decode step looks like, asked of its graph: state threads through, nothing is baked in, all is masked.

Each function returns findings as text; an empty list is a proof. Capacity and rung must be axes
that nothing else has.
"""

from __future__ import annotations

from collections.abc import Iterator

from mlx_audit.decode import attention_cuda
from mlx_audit.tracing.constants import Constant
from mlx_audit.tracing.graph import Graph, Node, Value

_WRITES = frozenset(("DynamicSliceUpdate", "Scatter", "ScatterAxis"))
_PRODUCTS = frozenset(("Matmul", "QuantizedMatmul", "GatherMM", "BlockMaskedMM"))
_FUSED = "ScaledDotProductAttention"
_SHAPES = frozenset(
    (
        "Broadcast",
        "ExpandDims",
        "Squeeze",
        "Reshape",
        "Flatten",
        "Unflatten",
        "Transpose",
        "AsType",
        "Copy",
        "View",
    )
)


def signature_drift(graph: Graph) -> list[str]:
    """Return state leaves that come out with another shape or dtype than they went in: each costs a new trace."""
    return [
        f"{path} goes in as {_form(before)} and comes out as {_form(after)}"
        for path, before, after in _leaves(graph)
        if (before.shape, before.dtype) != (after.shape, after.dtype)
    ]


def baked_arrays(graph: Graph, capacity: int, rung: int | None = None) -> list[str]:
    """Return cache arrays and weights that became constants of the graph instead of inputs."""
    rung = rung or capacity
    found = [
        f"constant {constant.dtype}{list(constant.shape)} has the form of a cache array, used by {graph.consumer(name)}"
        for name, constant in graph.constants.items()
        if _has(constant, capacity, rung) and len(constant.shape) >= 3
    ]
    for node in graph.nodes:
        if node.primitive in _PRODUCTS | _WRITES | {_FUSED} or _is_own_kernel(node):
            found += [
                f"{node.primitive} reads a cache array {_form(value)} that descends from no input of the step"
                for value in node.inputs
                if _has(value, capacity, rung) and len(value.shape) >= 3 and not graph.descent.get(value.name)
            ]
    return found + list(_baked_weights(graph))


def broken_threads(graph: Graph, capacity: int) -> list[str]:
    """Return state leaves that a step drops, leaves unchanged, or writes at a place that its position doesn't give."""
    found = []
    for path, before, after in _leaves(graph):
        own = path.rsplit(".", 1)[0]
        if before.name == after.name:
            found.append(f"{path} is unchanged by a step")
        elif not graph.descent.get(after.name, 0) & graph.descent[before.name]:
            found.append(f"{path} comes out without descending from what went in")
        elif capacity in before.shape:
            found += _bad_write(graph, path, own, before, after)
    return found


def unmasked_attention(graph: Graph, capacity: int, rung: int | None = None) -> tuple[list[str], int]:
    """Return attentions that the position does not mask over all keys, and how many attentions there are.

    The one constant slice of a buffer that is allowed is its prefix `[0:rung]`; the rung is the capacity by default.
    """
    rung = rung or capacity
    found: list[str] = []
    attentions: dict[int, Node] = {}
    for cache, buffers in _buffers(graph, capacity).items():
        readers = [reader for buffer in buffers for reader in _readers(graph, buffer.name, (capacity, rung))]
        found += [text for buffer in buffers for text in _cut(graph, cache, buffer, capacity, rung)]
        if not readers:
            found.append(f"{cache} is written, but no attention reads it over its whole rung")
        attentions |= {id(reader): reader for reader in readers}
    for node in graph.nodes:
        if node.primitive == "Softmax" and node.inputs[0].shape[-1] in (rung, rung + 1):
            attentions[id(node)] = node
    for index, node in enumerate(attentions.values()):
        if not _is_masked(graph, node, rung):
            found.append(
                f"attention {index} ({node.primitive} over {list(node.inputs[0].shape)}) has no mask that descends "
                "from the position"
            )
    return found, len(attentions)


def positions(graph: Graph) -> list[Value]:
    """Return the state inputs that are positions: integers of shape `[1]` or `[B]`."""
    return [
        value
        for value in graph.state_inputs
        if value.dtype.startswith(("int", "uint")) and len(value.shape) <= 1
    ]


def _leaves(graph: Graph) -> Iterator[tuple[str, Value, Value]]:
    return zip(graph.state_paths, graph.state_inputs, graph.state_outputs, strict=True)


def _has(value: Value | Constant, capacity: int, rung: int) -> bool:
    return capacity in value.shape or rung in value.shape


def _form(value: Value) -> str:
    return f"{value.dtype}{list(value.shape)}"


def _baked_weights(graph: Graph) -> Iterator[str]:
    """Yield weights that the step does not read although something of the same form takes their place.

    And matrices that only look like one of the weights: a captured copy beside a weight that is read elsewhere.
    """
    loose = [Value(name, c.shape, c.dtype) for name, c in graph.constants.items()]
    loose += [v for node in graph.nodes for v in node.outputs if not graph.descent.get(v.name)]
    named: set[tuple[int, ...]] = set()
    for parameter in graph.parameters:
        if parameter.name in graph.users or not parameter.shape:
            continue
        replacement = next((value for value in loose if _resembles(value, parameter)), None)
        if replacement is not None:
            named |= {parameter.shape, parameter.shape[::-1]}
            place = f"a constant {_form(replacement)} takes its place"
            yield f"weight {parameter.path} is not an input of the graph; {place}"
    weights = {parameter.shape: parameter.path for parameter in reversed(graph.parameters)}
    for node in graph.nodes:
        for value in node.inputs if node.primitive in _PRODUCTS else ():
            path = weights.get(value.shape) or weights.get(value.shape[::-1])
            if (
                path
                and len(value.shape) > 1
                and value.shape not in named
                and not graph.descent.get(value.name)
            ):
                yield f"{node.primitive} reads {_form(value)}, which has the form of {path} and descends from no input"


def _resembles(value: Value, weight: Value) -> bool:
    """Return whether a value could be a copy of a weight: a matrix may be cast or transposed on the way."""
    if len(weight.shape) > 1:
        return value.shape in (weight.shape, weight.shape[::-1])
    return (value.shape, value.dtype) == (weight.shape, weight.dtype)


def _bad_write(graph: Graph, path: str, own: str, before: Value, after: Value) -> Iterator[str]:
    """Check the chain of writes that leads from the buffer that went in to the one that came out."""
    position = [value for value in positions(graph) if value.path.rsplit(".", 1)[0] == own]
    value = after
    while value.name != before.name:
        node = graph.producer.get(value.name)
        if node is None or node.primitive not in _WRITES:
            source = node.primitive if node else (value.path or "another array")
            yield f"{path} is not written in place: it comes out of {source}"
            return
        start = node.inputs[-1] if node.primitive == "DynamicSliceUpdate" else node.inputs[1]
        if not graph.descends(start.name, position):
            yield f"{path} is written at a place that does not descend from {own}'s own position"
        value = node.inputs[0]


def _buffers(graph: Graph, capacity: int) -> dict[str, list[Value]]:
    """Return the written buffers of each cache: the state outputs that have the capacity as an axis."""
    buffers: dict[str, list[Value]] = {}
    for path, before, after in _leaves(graph):
        if capacity in before.shape:
            buffers.setdefault(path.rsplit(".", 1)[0], []).append(after)
    return buffers


def _readers(graph: Graph, name: str, axes: tuple[int, int]) -> Iterator[Node]:
    """Yield the softmaxes, or fused attentions, that a buffer reaches through exactly one matrix product."""
    waiting, seen = [(name, 0)], {name}
    while waiting:
        current, products = waiting.pop()
        for node in graph.users.get(current, ()):
            if (
                node.primitive == _FUSED
                or _is_own_kernel(node)
                or (node.primitive == "Softmax" and products == 1)
            ):
                yield node
                continue
            passed = products + (node.primitive in _PRODUCTS)
            if passed > 1 or node.primitive == "Softmax" or (passed == 0 and not _keeps(node, axes)):
                continue
            for output in node.outputs:
                if output.name not in seen:
                    seen.add(output.name)
                    waiting.append((output.name, passed))


def _keeps(node: Node, axes: tuple[int, int]) -> bool:
    """Return whether a primitive may stand between a buffer and the product that reads it, such as a rotation."""
    return any(_has(output, *axes) for output in node.outputs)


def _cut(graph: Graph, cache: str, buffer: Value, capacity: int, rung: int) -> Iterator[str]:
    """Yield constant slices that cut a buffer's slots, which would hide keys at every other position."""
    waiting, seen = [buffer], {buffer.name}
    while waiting:
        for node in graph.users.get(waiting.pop().name, ()):
            for output in node.outputs:
                if node.primitive == "Slice" and _cuts_slots(node, capacity, rung):
                    yield f"{cache} is cut to {list(output.shape)} by a constant slice {node.arguments}"
                elif (node.primitive in _SHAPES or node.primitive == "Slice") and output.name not in seen:
                    seen.add(output.name)
                    waiting.append(output)


def _cuts_slots(node: Node, capacity: int, rung: int) -> bool:
    """Return whether a slice takes anything but all slots of a buffer, or the first `rung` of them."""
    bounds = zip(node.inputs[0].shape, *node.arguments, strict=False)
    return any(
        size in (capacity, rung) and (start != 0 or end not in (size, rung) or stride != 1)
        for size, start, end, stride in bounds
    )


def _is_masked(graph: Graph, attention: Node, rung: int) -> bool:
    """Return whether a mask over all keys that descends from a position reaches the attention's scores."""
    where = positions(graph)

    def masks(value: Value) -> bool:
        return rung in value.shape and graph.descends(value.name, where)

    if _is_own_kernel(attention):
        return _stops_at_position(graph, attention, where)
    if attention.primitive == _FUSED:
        return any(masks(value) and len(value.shape) == 4 for value in attention.inputs[3:])
    waiting, seen = [attention.inputs[0].name], set[str]()
    while waiting:
        node = graph.producer.get(waiting.pop())
        if node is None or node.primitive in _PRODUCTS:
            continue
        if node.primitive == "Select" and masks(node.inputs[0]) and node.inputs[0].dtype == "bool":
            return True
        if node.primitive == "Add" and any(masks(v) and _is_additive_mask(graph, v) for v in node.inputs):
            return True
        for value in node.inputs:
            if value.name not in seen:
                seen.add(value.name)
                waiting.append(value.name)
    return False


def _is_own_kernel(node: Node) -> bool:
    """Return whether a node is the attention kernel for CUDA, which needs no mask."""
    return node.primitive == "CustomKernel" and attention_cuda.NAME in str(node.arguments[0])


def _stops_at_position(graph: Graph, kernel: Node, where: list[Value]) -> bool:
    """Return whether the kernel gets, as it came in, the position of the cache whose buffers it reads."""
    if len(kernel.inputs) != 4:
        return False
    sources = []
    for value in kernel.inputs[1:3]:
        while (node := graph.producer.get(value.name)) is not None and node.primitive in _WRITES:
            value = node.inputs[0]
        sources.append(next((own.path for own in graph.state_inputs if own.name == value.name), ""))
    position = next((own.path for own in where if own.name == kernel.inputs[3].name), "")
    caches = {path.rsplit(".", 1)[0] for path in (*sources, position)}
    return len(caches) == 1 and caches != {""}


def _is_additive_mask(graph: Graph, value: Value) -> bool:
    """Return whether a value is a float mask: a boolean that was only cast adds 1 and hides nothing."""
    for node in graph.ancestors(value.name):
        if node.primitive in _PRODUCTS:
            return False
        if node.primitive in ("Select", "Multiply", "Log") and not node.outputs[0].dtype.startswith(
            ("int", "uint")
        ):
            return True
    return False
