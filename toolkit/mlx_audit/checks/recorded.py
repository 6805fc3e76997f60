"""What each layer was given and gave back, eagerly or as further outputs of a compiled step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_audit.decode import DecodeStep, State


@dataclass
class LayerCall:
    """One call of a layer.

    Attributes:
        layer: Its index.
        arrays: The arrays among its arguments, hidden states `[B, L, width]` first, masks among the others.
        output: The first array that it returned.
        caches: Its other arguments, a cache among them.
    """

    layer: int
    arrays: list[mx.array]
    output: mx.array
    caches: list[Any] = field(repr=False)


def layers_of(model: nn.Module) -> list[nn.Module]:
    """Return the layers of a model: those that it names so, or the longest list of modules in it."""
    lists = [getattr(model, "layers", None) or []]
    if not lists[0]:
        lists = [
            value
            for _, module in model.named_modules()
            for value in module.children().values()
            if isinstance(value, list)
        ]
    longest = max(lists, key=len, default=[])
    unique = {id(layer): layer for layer in longest if isinstance(layer, nn.Module)}
    return list(unique.values())


@contextmanager
def recording(model: nn.Module) -> Iterator[list[LayerCall]]:
    """Note each call of a layer; the module tree stays as it is."""
    calls: list[LayerCall] = []
    changed: list[tuple[nn.Module, type[nn.Module]]] = []
    try:
        for index, layer in enumerate(layers_of(model)):
            own = type(layer)
            changed.append((layer, own))
            layer.__class__ = type(own.__name__, (own,), {"__call__": _noting(own, index, calls)})
        yield calls
    finally:
        for layer, own in reversed(changed):
            layer.__class__ = own


def _noting(own: type[nn.Module], index: int, calls: list[LayerCall]) -> Any:
    def call(self: nn.Module, *arguments: Any, **options: Any) -> Any:
        result = own.__call__(self, *arguments, **options)
        given = [*arguments, *options.values()]
        output = next(leaf for leaf in _flat(result) if isinstance(leaf, mx.array))
        arrays = [item for item in given if isinstance(item, mx.array)]
        others = [item for item in given if not isinstance(item, mx.array)]
        calls.append(LayerCall(index, arrays, output, others))
        return result

    return call


def _flat(tree: Any) -> Iterator[Any]:
    if isinstance(tree, list | tuple):
        for item in tree:
            yield from _flat(item)
    else:
        yield tree


class RecordedStep:
    """A compiled step that gives what its layers saw and made beside its results; traced once.

    Args:
        step: The very step that a session compiles.
    """

    def __init__(self, step: DecodeStep) -> None:
        self.step = step
        self.reached = 0
        """Layers that the trace came through."""
        self._layers: list[int] = []
        self._compiled = mx.compile(self._run)

    def __call__(self, state: State, token: int) -> tuple[mx.array, State, list[LayerCall]]:
        """Feed one token; return logits, the new state, and the calls of the layers in order."""
        parameters, ids = self.step.parameters(), mx.array([token], mx.int32)
        logits, new, recorded = self._compiled(parameters, state, ids)
        mx.eval(logits, new, recorded)
        calls = [
            LayerCall(layer, arrays[:-1], arrays[-1], [])
            for layer, arrays in zip(self._layers, recorded, strict=True)
        ]
        return logits, new, calls

    def _run(self, parameters: Sequence[mx.array], state: State, tokens: mx.array) -> Any:
        with recording(self.step.model) as calls:
            try:
                logits, new = self.step(parameters, state, tokens)
            finally:
                self.reached = len(calls)
        self._layers = [call.layer for call in calls]
        return logits, new, [[*call.arrays, call.output] for call in calls]
