"""What may be lost of a state that each step replaces as a whole, and of quantized slots."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from mlx_audit.caches.arrays import FixedCapacityArraysCache as Arrays
from mlx_audit.caches.quantized import FixedCapacityQuantizedCache as Quantized
from mlx_audit.faults.base import Patch, fault


@fault("TRC003", needs="arrays")
def state_without_its_last_array(patch: Patch) -> None:
    """One array of the state is not handed to the step, which then has it as a constant."""
    own = Arrays.with_state
    whole = Arrays.state.fget  # type: ignore[attr-defined]

    def with_state(self: Arrays, state: Sequence[mx.array], *, held: int | None = None) -> Arrays:
        missing = whole(self)[len(state) :]
        return own(self, [*state, *missing], held=held)

    patch.setattr(Arrays, "with_state", with_state)
    patch.setattr(Arrays, "state", property(lambda self: whole(self)[:-1]))
    patch.setattr(Arrays, "roles", property(lambda self: ["recurrent"] * len(self.state)))


@fault("STA001", needs="arrays")
def recurrent_state_shifted(patch: Patch) -> None:
    """The first array of a state, the window of a convolution, comes out turned by one place."""
    own = Arrays.__setitem__

    def setitem(self: Arrays, index: int, value: mx.array) -> None:
        own(self, index, mx.roll(value, 1, axis=1) if index == 0 else value)

    patch.setattr(Arrays, "__setitem__", setitem)


@fault("PAR005", needs="arrays")
def recurrent_state_of_another_row(patch: Patch) -> None:
    """Each row of a batch goes on from its neighbour's state."""
    own = Arrays.with_state

    def with_state(self: Arrays, state: Sequence[mx.array], *, held: int | None = None) -> Arrays:
        return own(self, [mx.roll(array, 1, axis=0) for array in state], held=held)

    patch.setattr(Arrays, "with_state", with_state)


@fault("STA001", needs="arrays")
def recurrent_state_in_half_precision(patch: Patch) -> None:
    """What is carried from step to step is rounded to bfloat16."""
    own = Arrays.__setitem__

    def setitem(self: Arrays, index: int, value: mx.array) -> None:
        own(self, index, value.astype(mx.bfloat16).astype(value.dtype))

    patch.setattr(Arrays, "__setitem__", setitem)


@fault("STA001", needs="arrays")
def recurrent_state_three_tokens_stale(patch: Patch) -> None:
    """The state of a prompt is taken over as it was three tokens before its end."""
    from mlx_audit.decode import CompiledDecodeSession as Session

    own = Session._read_eagerly

    def read_eagerly(self: Session, ids: mx.array) -> Any:
        logits, natives = own(self, ids)
        if ids.shape[1] < 5:
            return logits, natives
        _, early = own(self, ids[:, :-3])
        for native, stale in zip(natives, early, strict=True):
            _take_arrays(native, stale)
        return logits, natives

    patch.setattr(Session, "_read_eagerly", read_eagerly)


def _take_arrays(native: Any, stale: Any) -> None:
    if hasattr(native, "caches"):
        for part, other in zip(native.caches, stale.caches, strict=True):
            _take_arrays(part, other)
    elif hasattr(native, "cache"):
        native.cache = stale.cache


@fault("MSK001", needs="quantized")
def quantized_scales_swapped(patch: Patch) -> None:
    """Keys are read with the scales of the values, and values with those of the keys."""
    own = Quantized.keys_and_values

    def keys_and_values(self: Quantized) -> Any:
        (keys, *of_keys), (values, *of_values) = own(self)
        return (keys, *of_values), (values, *of_keys)

    patch.setattr(Quantized, "keys_and_values", keys_and_values)


@fault("TRC004", needs="quantized")
def quantized_position_stands_still(patch: Patch) -> None:
    """The position of a quantized cache comes out as it went in."""
    own = Quantized.update_and_fetch

    def update_and_fetch(self: Quantized, keys: mx.array, values: mx.array) -> Any:
        before = self._position
        fetched = own(self, keys, values)
        self._position = before
        return fetched

    patch.setattr(Quantized, "update_and_fetch", update_and_fetch)
