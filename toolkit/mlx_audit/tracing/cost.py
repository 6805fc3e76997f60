"""What one decode step reads and does, from its graph alone."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from math import prod

from mlx_audit.tracing.graph import Graph, Value
from mlx_audit.tracing.primitives import EXPERTS, LOOKUPS, SHAPES

_BYTES = {"bool": 1, "uint8": 1, "int8": 1, "uint16": 2, "int16": 2, "float16": 2, "bfloat16": 2}
_WIDE = {"int64": 8, "uint64": 8, "float64": 8, "complex64": 8}


@dataclass(frozen=True)
class Cost:
    """Cost of one step for one row.

    Attributes:
        capacity: Tokens that the caches hold, and that a step attends over.
        weights_bytes: Parameters read; of experts, as many as a token goes to; of an embedding, nothing.
        cache_bytes: Caches read, at this capacity: rings and recurrent state no longer grow there.
        primitives: Operations in the graph, before fusion.
        equal_capacity: Capacity at which the cache costs as much as the weights. A fixed-capacity step reads all of
            its capacity while eager decoding reads what is filled, so well beyond this a compiled step stops paying
            unless the cache is nearly full.
    """

    capacity: int
    weights_bytes: int
    cache_bytes: int
    primitives: int
    equal_capacity: int

    def figures(self) -> dict[str, int]:
        """Return the fields as plain figures."""
        return asdict(self)


def step_cost(graph: Graph, capacity: int) -> Cost:
    """Return the cost of a step at `capacity`, from a graph that was traced at any other."""
    weights = sum(round(_size(value) * _share(graph, value)) for value in graph.parameters)
    token, fixed = 0.0, 0
    for leaf, value in zip(graph.leaves, graph.state_inputs, strict=True):
        if leaf.role == "buffer" and (leaf.slots == leaf.capacity or leaf.kind == "pooled"):
            token += _size(value) / leaf.capacity
        elif leaf.role == "buffer":
            fixed += _size(value) // leaf.slots * min(leaf.slots, capacity)
        elif leaf.role == "recurrent":
            fixed += _size(value)
    return Cost(
        capacity=capacity,
        weights_bytes=weights,
        cache_bytes=round(token * capacity) + fixed,
        primitives=len(graph.nodes),
        equal_capacity=int(max(0, weights - fixed) // token) if token else 0,
    )


def _share(graph: Graph, weight: Value) -> float:
    """Return which part of a weight a step reads, from 0 to 1."""
    share, waiting, seen = 0.0, [weight.name], {weight.name}
    while waiting:
        for node in graph.users.get(waiting.pop(), ()):
            if node.primitive in EXPERTS and weight.shape:
                # One index a product: the experts that a token goes to.
                share = max(share, min(1.0, prod(node.inputs[-1].shape) / weight.shape[0]))
            elif node.primitive in SHAPES:
                waiting += [output.name for output in node.outputs if output.name not in seen]
                seen |= {output.name for output in node.outputs}
            elif node.primitive not in LOOKUPS:
                return 1.0
    return share


def _size(value: Value) -> int:
    return prod(value.shape) * (_BYTES.get(value.dtype) or _WIDE.get(value.dtype, 4))
