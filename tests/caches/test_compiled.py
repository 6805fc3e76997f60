"""Every kind of cache in a compiled step: one trace, the same tokens seen, nothing copied that a step can write."""

from __future__ import annotations

import gc
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from cache_oracle import (
    Ids,
    Kind,
    adopted,
    chunked,
    composite,
    feed,
    forms,
    linear,
    merged,
    quantized,
    rotating,
    wanted,
)
from mlx_audit.caches import FixedCapacityCache
from mlx_audit.decode.counted import CountedCompile
from mlx_audit.decode.step import DecodeStep

KINDS = {
    "linear": linear(),
    "rotating": rotating(5),
    "rotating, window 1": rotating(1),
    "rotating, 2 kept": rotating(5, 2),
    "rotating, all but one kept": rotating(4, 3),
    "chunked": chunked(4),
    "quantized": quantized(8),
    "composite": composite(rotating(3), composite(linear(), chunked(4))),
}


class Echo(nn.Module):
    """A model whose logits are the token ids that each cache shows to attention; -1 where it hides one."""

    def __init__(self, kind: Kind) -> None:
        super().__init__()
        self.widths = [part.widths for part in kind.parts]

    def __call__(self, tokens: mx.array, cache: list[FixedCapacityCache]) -> mx.array:
        shown = []
        parts: list[Any] = cache[0].parts
        for part, widths in zip(parts, self.widths, strict=True):
            mask = part.make_mask(tokens.shape[1])
            mark = tokens[:, None, :, None] * mx.array([1.0, 2.0])[None, :, None, None]
            keys, values = (
                sign * mx.repeat(mark, width, axis=3) for sign, width in zip((1, -1), widths, strict=True)
            )
            keys, _ = part.update_and_fetch(keys, values)
            if isinstance(keys, tuple):
                keys = mx.dequantize(*keys, group_size=part.group_size, bits=part.bits)
            shown.append(mx.where(mask[:, 0], keys[:, 0, :, 0][:, None], -1))
        return mx.concatenate(shown, axis=-1)


class Touch(Echo):
    """Writes, and looks at a few slots only, so that what a step allocates is what it copies."""

    def __call__(self, tokens: mx.array, cache: list[FixedCapacityCache]) -> mx.array:
        super().__call__(tokens, cache)
        return mx.stack([array[:, 0, :3, 0].sum() for array in cache[0].state if array.ndim == 4])[None, None]


def ids_in(logits: mx.array, kind: Kind, cache: FixedCapacityCache) -> list[list[Ids]]:
    """Return the ids of each part and row, as `wanted` does."""
    ends = np.cumsum([part.slots for part in cache.parts])[:-1]
    return [
        [[sorted(int(i) for i in np.rint(row) if i >= 0)] for row in part]
        for part in np.split(np.array(logits), ends, axis=-1)
    ]


RAGGED = ("linear", "rotating", "chunked", "quantized", "composite")
TRIALS = [(name, ragged) for name in KINDS for ragged in (False, True) if not ragged or name in RAGGED]


@pytest.mark.parametrize(("name", "ragged"), TRIALS)
def test_one_trace_serves_every_position(name: str, ragged: bool) -> None:
    kind = KINDS[name]
    rows = [[1, 2], [3, 4]] if not ragged else [[1, 2], [3, 4, 5, 6, 7]]
    cache = (merged if ragged else adopted)(kind, rows, 2, 25)
    step = DecodeStep(Echo(kind), [cache])
    compiled, state = CountedCompile(step), [cache.state]
    eager, before = cache.copy(), forms(cache)
    for token in range(10, 26):
        logits, state = compiled(step.parameters(), state, mx.array([token, token + 50], mx.int32))
        rows = [[*row, token + 50 * index] for index, row in enumerate(rows)]
        assert ids_in(logits, kind, cache) == wanted(kind, rows, 1)
        feed(eager, kind, [[token], [token + 50]])
        assert [(tuple(a.shape), a.dtype) for a in state[0]] == before
    assert (compiled.trace_count, compiled.reasons, step.written) == (1, [], [])
    own = cache.with_state(state[0])
    own.require_sound()
    assert own.count() == eager.count() == max(map(len, rows))
    for got, want in zip(own.state, eager.state, strict=True):
        assert np.allclose(np.array(got), np.array(want))


SLOTS = 1 << 17
LARGE = {
    "linear": linear(),
    "rotating": rotating(SLOTS),
    "rotating, 2 kept": rotating(SLOTS, 2),
    "chunked": chunked(SLOTS),
    "quantized": quantized(8),
    "composite": composite(linear(), rotating(SLOTS)),
}


def turned(cache: FixedCapacityCache) -> list[mx.array]:
    """Return a state that stands just before the end of the slots, so that rings turn."""
    return [
        mx.full(array.shape, SLOTS - 2, mx.int32) if role == "position" else mx.array(array)
        for array, role in zip(cache.state, cache.roles, strict=True)
    ]


@pytest.mark.parametrize(("name", "ragged"), [trial for trial in TRIALS if trial[0] in LARGE])
def test_a_step_writes_into_its_buffers_instead_of_copying_them(name: str, ragged: bool) -> None:
    """At megabytes a buffer, a copy a step would show at once in the peak."""
    kind = LARGE[name]
    gc.collect()
    before = mx.get_active_memory()
    rows = [[1, 2, 3]] * 2 if not ragged else [[1, 2, 3], [4]]
    cache = (merged if ragged else adopted)(kind, rows, 2, SLOTS + 8)
    step = DecodeStep(Touch(kind), [cache])
    compiled, state, token = CountedCompile(step), [turned(cache)], mx.array([7, 8], mx.int32)
    del cache
    least = min(array.nbytes for array in state[0] if array.ndim == 4)
    for count in range(6):
        if count == 2:
            gc.collect()
            mx.reset_peak_memory()
            base = mx.get_active_memory()
        logits, state[:] = compiled(step.parameters(), state, token)
        mx.eval(logits, state)
        del logits
    # What the step's own caches were adopted with, and the state; nothing holds a third.
    assert base - before < 2 * sum(array.nbytes for array in state[0]) + least / 2
    assert mx.get_peak_memory() - base < least / 2
    assert compiled.trace_count == 1
