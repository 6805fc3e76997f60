"""A traced step as data: inputs, constants and primitives, and what descends from what."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from mlx_audit.caches import Role
from mlx_audit.tracing.constants import Constant

CONSUMERS = {
    "DynamicSliceUpdate": "cache write",
    "Scatter": "cache write",
    "ScatterAxis": "cache write",
    "RoPE": "RoPE",
    "Cos": "RoPE",
    "Sin": "RoPE",
    "Select": "mask",
    "ScaledDotProductAttention": "attention",
    "CustomKernel": "attention",
    "Softmax": "attention",
}
"""What a primitive does in a decode step, for messages."""


class Value(NamedTuple):
    """An array of the graph; `path` says what an input is."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    path: str = ""

    def __str__(self) -> str:
        return f"{self.path or self.name} {self.form}"

    @property
    def form(self) -> str:
        """Dtype and shape, such as `float32[1, 2]`."""
        return f"{self.dtype}{list(self.shape)}"


class Leaf(NamedTuple):
    """One array of the state.

    Attributes:
        path: Such as `caches[3].keys`, or `caches[3][1].keys` inside a composite.
        role: What it is.
        kind: Of the cache that it belongs to.
        slots: Slots of that cache's buffers.
        extent: Slots that the traced step attends over.
        capacity: Tokens that the cache holds.
    """

    path: str
    role: Role
    kind: str = "linear"
    slots: int = 0
    extent: int = 0
    capacity: int = 0

    @property
    def cache(self) -> str:
        """The path of the cache that it belongs to."""
        return self.path.rsplit(".", 1)[0]


class Node(NamedTuple):
    """One primitive with its static arguments."""

    primitive: str
    arguments: tuple[Any, ...]
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]


@dataclass
class Graph:
    """The graph of one decode step.

    `inputs` are the parameters, then the state leaf by leaf, then the tokens; `outputs` are the logits, then the
    state in the same order.
    """

    inputs: list[Value]
    outputs: list[Value]
    constants: dict[str, Constant]
    nodes: list[Node]
    parameter_count: int
    leaves: list[Leaf] = field(default_factory=list)
    """The state, leaf by leaf."""

    @property
    def parameters(self) -> list[Value]:
        """The inputs that are weights."""
        return self.inputs[: self.parameter_count]

    @property
    def state_inputs(self) -> list[Value]:
        """The inputs that are cache arrays."""
        return self.inputs[self.parameter_count : -1]

    @property
    def state_outputs(self) -> list[Value]:
        """The outputs that are cache arrays."""
        return self.outputs[1:]

    def state(self) -> Iterator[tuple[Leaf, Value, Value]]:
        """Yield each leaf of the state, as it goes in and as it comes out."""
        return zip(self.leaves, self.state_inputs, self.state_outputs, strict=True)

    def positions(self) -> list[Value]:
        """Return the state inputs that are positions."""
        return [before for leaf, before, _ in self.state() if leaf.role == "position"]

    def is_unused(self, before: Value, after: Value) -> bool:
        """Return whether a buffer holds nothing: it has no room, or a step neither reads it nor fills it."""
        return 0 in before.shape or (before.name not in self.users and not self.descent.get(after.name))

    @cached_property
    def producer(self) -> dict[str, Node]:
        """The node that makes each value."""
        return {output.name: node for node in self.nodes for output in node.outputs}

    @cached_property
    def users(self) -> dict[str, list[Node]]:
        """The nodes that read each value."""
        users: dict[str, list[Node]] = {}
        for node in self.nodes:
            for value in node.inputs:
                users.setdefault(value.name, []).append(node)
        return users

    @cached_property
    def descent(self) -> dict[str, int]:
        """For each value, a bit set of the inputs that it descends from: bit `i` stands for `inputs[i]`."""
        bits = {value.name: 1 << index for index, value in enumerate(self.inputs)}
        for node in self.nodes:
            total = 0
            for value in node.inputs:
                total |= bits.get(value.name, 0)
            for output in node.outputs:
                bits[output.name] = total
        return bits

    def descends(self, name: str, inputs: Iterable[Value]) -> bool:
        """Return whether a value descends from one of `inputs`."""
        own = self.descent.get(name, 0)
        return any(own & self.descent[value.name] for value in inputs)

    def consumer(self, name: str) -> str:
        """Return what uses a value in the end: a write, RoPE, a mask, attention, or the nearest primitive."""
        nearest = next((node.primitive for node in self.users.get(name, ())), "output")
        waiting, seen = [name], {name}
        while waiting and len(seen) < 200:
            for node in self.users.get(waiting.pop(0), ()):
                if node.primitive in CONSUMERS:
                    return f"{CONSUMERS[node.primitive]} ({node.primitive})"
                for output in node.outputs:
                    if output.name not in seen:
                        seen.add(output.name)
                        waiting.append(output.name)
        return nearest

    def ancestors(self, name: str) -> Iterator[Node]:
        """Yield the nodes that a value is made of, nearest first; a caller may stop at any of them."""
        waiting, seen = [name], {name}
        while waiting:
            node = self.producer.get(waiting.pop(0))
            if node is not None:
                yield node
                for value in node.inputs:
                    if value.name not in seen:
                        seen.add(value.name)
                        waiting.append(value.name)
