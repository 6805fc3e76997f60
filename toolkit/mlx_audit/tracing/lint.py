"""What a right decode step looks like, asked of its graph: state threads through, nothing is baked in, all is masked.

Each function returns findings as text; an empty list is a proof. Capacity and rung must be axes that nothing else has.
"""

from __future__ import annotations

from collections.abc import Iterator

from mlx_audit.tracing.constants import Constant
from mlx_audit.tracing.graph import Graph, Leaf, Value
from mlx_audit.tracing.primitives import FUSED, PRODUCTS, WRITES, is_own_kernel


def signature_drift(graph: Graph) -> list[str]:
    """Return state leaves that come out with another shape or dtype than they went in: each costs a new trace."""
    return [
        f"{leaf.path} goes in as {before.form} and comes out as {after.form}"
        for leaf, before, after in graph.state()
        if (before.shape, before.dtype) != (after.shape, after.dtype)
    ]


def baked_arrays(graph: Graph) -> list[str]:
    """Return cache arrays and weights that became constants of the graph instead of inputs."""
    forms = _CacheForms(graph)
    found = [
        f"constant {constant.dtype}{list(constant.shape)} has the form of a cache array, used by {graph.consumer(name)}"
        for name, constant in graph.constants.items()
        if forms.has(constant)
    ]
    for node in graph.nodes:
        if node.primitive in PRODUCTS | WRITES | {FUSED} or is_own_kernel(node):
            found += [
                f"{node.primitive} reads a cache array {value.form} that descends from no input of the step"
                for value in node.inputs
                if forms.has(value) and not graph.descent.get(value.name)
            ]
    return found + list(_baked_weights(graph))


def broken_threads(graph: Graph) -> list[str]:
    """Return state leaves that a step drops, leaves unchanged, or writes at a place that its position doesn't give."""
    found = []
    used = {leaf.cache for leaf, before, after in graph.state() if not graph.is_unused(before, after)}
    for leaf, before, after in graph.state():
        if leaf.role == "buffer" and leaf.cache in used and graph.is_unused(before, after):
            continue
        if before.name == after.name:
            found.append(f"{leaf.path} is unchanged by a step")
        elif leaf.role == "recurrent":
            found += _lost(graph, leaf, before, after)
        elif not graph.descent.get(after.name, 0) & graph.descent[before.name]:
            found.append(f"{leaf.path} comes out without descending from what went in")
        elif leaf.role == "buffer":
            found += _bad_write(graph, leaf, before, after)
    return found


class _CacheForms:
    """What an array must look like to be taken for the content of a cache."""

    def __init__(self, graph: Graph) -> None:
        buffers = [(leaf, value) for leaf, value, _ in graph.state() if leaf.role == "buffer"]
        # Where a cache holds the whole text, its sizes are primes that nothing else has; a ring's may be any number.
        self._axes = {
            size for leaf, _ in buffers if leaf.slots == leaf.capacity for size in (leaf.slots, leaf.extent)
        }
        self._shapes = {value.shape for _, value in buffers}

    def has(self, value: Value | Constant) -> bool:
        """Return whether a value could be a cache array."""
        own_axis = len(value.shape) >= 3 and not self._axes.isdisjoint(value.shape)
        return own_axis or tuple(value.shape) in self._shapes


def _lost(graph: Graph, leaf: Leaf, before: Value, after: Value) -> Iterator[str]:
    """Yield what is wrong with a state that each step replaces."""
    tokens = graph.inputs[-1]
    if before.name not in graph.users:
        yield f"{leaf.path} is not read by a step, so nothing carries over"
    elif not graph.descends(after.name, [before, tokens]):
        yield f"{leaf.path} comes out without descending from what went in"


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
            place = f"a constant {replacement.form} takes its place"
            yield f"weight {parameter.path} is not an input of the graph; {place}"
    weights = {parameter.shape: parameter.path for parameter in reversed(graph.parameters)}
    for node in graph.nodes:
        for value in node.inputs if node.primitive in PRODUCTS else ():
            path = weights.get(value.shape) or weights.get(value.shape[::-1])
            if (
                path
                and len(value.shape) > 1
                and value.shape not in named
                and not graph.descent.get(value.name)
            ):
                yield f"{node.primitive} reads {value.form}, which has the form of {path} and descends from no input"


def _resembles(value: Value, weight: Value) -> bool:
    """Return whether a value could be a copy of a weight: a matrix may be cast or transposed on the way."""
    if len(weight.shape) > 1:
        return value.shape in (weight.shape, weight.shape[::-1])
    return (value.shape, value.dtype) == (weight.shape, weight.dtype)


def _bad_write(graph: Graph, leaf: Leaf, before: Value, after: Value) -> Iterator[str]:
    """Check the chain of writes that leads from the buffer that went in to the one that came out."""
    position = [value for value in graph.positions() if value.path.rsplit(".", 1)[0] == leaf.cache]
    value = after
    while value.name != before.name:
        node = graph.producer.get(value.name)
        if node is not None and node.primitive == "Depends":
            # It only orders evaluation: each output is the input in the same place.
            value = node.inputs[node.outputs.index(value)]
            continue
        if node is None or node.primitive not in WRITES:
            source = node.primitive if node else (value.path or "another array")
            yield f"{leaf.path} is not written in place: it comes out of {source}"
            return
        start = node.inputs[-1] if node.primitive == "DynamicSliceUpdate" else node.inputs[1]
        if not graph.descends(start.name, position):
            yield f"{leaf.path} is written at a place that does not descend from {leaf.cache}'s own position"
        value = node.inputs[0]
