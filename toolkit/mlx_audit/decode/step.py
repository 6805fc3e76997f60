"""The pure decode step: `(parameters, state, tokens) → (logits, state)`, for compiling and for tracing alike."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_audit.adapters.module_state import ModuleState, Parameters, Slot, of_arrays
from mlx_audit.caches import FixedCapacityCache
from mlx_audit.decode.attention_cuda import position_bounded_attention
from mlx_audit.decode.state import require_fixed_capacity

State = list[list[mx.array]]
"""One list of arrays for each cache."""


class DecodeStep:
    """The model's own forward as a function of arrays alone.

    Args:
        model: An mlx-lm model.
        caches: Fixed-capacity caches that give the layout of the state; their arrays are not used.
    """

    def __init__(self, model: nn.Module, caches: Sequence[FixedCapacityCache]) -> None:
        require_fixed_capacity(caches)
        self.model = model
        self.caches = tuple(caches)
        self.ragged = any(cache.ragged for cache in caches)
        self._parameters = Parameters(model)
        self.written: list[str] = []
        """What the last run of the body wrote outside the caches, by path; arrays were put back."""
        self.rewritten: dict[str, mx.array] = {}
        """The parameters among it, with what took their place; placeholders where the step was traced."""

    def at_rung(self, rung: int) -> DecodeStep:
        """Return the step that attends over the first `rung` slots."""
        return DecodeStep(self.model, [cache.at_rung(rung) for cache in self.caches])

    def slots(self) -> list[Slot]:
        """Return the places of the parameters, in the order of `parameters()`."""
        return self._parameters.slots()

    def parameters(self) -> list[mx.array]:
        """Return the model's parameters as they are now; replaced and changed weights both count."""
        return self._parameters.arrays()

    def __call__(
        self, parameters: Sequence[mx.array], state: State, tokens: mx.array
    ) -> tuple[mx.array, State]:
        """Run one token a row.

        Args:
            parameters: In the order of `slots()`.
            state: One list of arrays for each cache.
            tokens: int32 `[B]`.

        Returns:
            Logits `[B, vocabulary]` and the new state.
        """
        before = ModuleState(self.model)
        slots = self._parameters.slots()
        try:
            for slot, parameter in zip(slots, parameters, strict=True):
                slot.container[slot.key] = parameter
            caches = [cache.with_state(arrays) for cache, arrays in zip(self.caches, state, strict=True)]
            with position_bounded_attention(caches):
                logits = run(self.model, tokens[:, None], caches)
        except BaseException:
            before.restore(code=False)
            raise
        given = {(id(slot.container), slot.key): array for slot, array in zip(slots, parameters, strict=True)}
        changes = before.changes()
        # Arrays are placeholders now and must go. A Python value that the forward changed stays changed, as in eager
        # decoding, so that the trace proof can see its effect.
        before.undo(of_arrays(changes))
        before.rewind()
        written = [c for c in changes if given.get((id(c.container), c.key)) is not c.new]
        self.rewritten = {
            c.path: c.new
            for c in written
            if (id(c.container), c.key) in given and isinstance(c.new, mx.array)
        }
        self.written = list(dict.fromkeys([*(c.path for c in written), *_kept(caches, self.caches)]))
        return logits, [cache.state for cache in caches]


def _kept(caches: Sequence[FixedCapacityCache], bare: Sequence[FixedCapacityCache]) -> Iterator[str]:
    """Yield attributes that a forward has added to the cache objects, which a step throws away."""
    for index, pair in enumerate(zip(caches, bare, strict=True)):
        for cache, before in zip(*(cache.parts for cache in pair), strict=True):
            for name in vars(cache).keys() - vars(before).keys():
                if name != "handed":
                    yield f"caches[{index}].{name}"


def run(model: nn.Module, tokens: mx.array, caches: Sequence[Any]) -> mx.array:
    """Return the logits `[B, vocabulary]` after the last of `tokens` `[B, L]`, with any kind of caches."""
    logits: mx.array = model(tokens, cache=list(caches))
    return logits[:, -1]
