"""Caches that stand at far positions without the tokens in front of them: no forward has to read those."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import lcm
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache, QuantizedKVCache

from mlx_audit.adapters import adapter_for
from mlx_audit.caches import FixedCapacityCache
from mlx_audit.checks.content import content, leaves, own_state
from mlx_audit.checks.parts import specs_of
from mlx_audit.checks.runs import Comparer, Eager, teacher_tokens
from mlx_audit.checks.stand_ins import stand_ins_for
from mlx_audit.checks.subject import Subject
from mlx_audit.decode import DecodeStep
from mlx_audit.decode.ladder import rung_for
from mlx_audit.evidence.environment import backend
from mlx_audit.models.live import flat_specs

BEGINNING = 3
"""Tokens that are read before the random keys and values; more where entries are pooled."""

STEPS = 3
"""Steps at each far position."""

_LOUD = 4.0
"""Size of random keys and values: among so many, small ones would drown what a step adds."""


def compare_far(subject: Subject, positions: Sequence[int]) -> list[int]:
    """Compare compiled steps with eager ones at far positions, and return the positions.

    In each dtype on the CPU, in float32 elsewhere. Three tokens are read, and random keys and values written after
    them. In a short dtype what a step writes counts too: there a rotation by another position is hardly seen in logits.

    Raises:
        CheckFailed: logits, or the keys and values that the steps wrote, differ.
    """
    if all(spec.kind == "arrays" for spec in flat_specs(subject.model)):
        return []
    # Keys of this size magnify what kernels round differently; on the CPU both sides take the same ones.
    dtypes = subject.amounts.dtypes if backend() == "cpu" else ("float32",)
    for dtype in dtypes:
        own = subject if dtype == subject.dtype else replace(subject, dtype=dtype)
        with stand_ins_for(dtype):
            for position in positions:
                _one(own, position)
    return list(positions)


def _one(subject: Subject, position: int) -> None:
    beginning = _beginning(subject, position)
    tokens = teacher_tokens(subject, beginning + STEPS, stream=22)
    eager, comparer = Eager(subject.model), Comparer(subject.tolerance)
    eager.feed(tokens[:beginning])
    capacity = position + STEPS + 1
    empty = adapter_for(subject.model, evidence="ignore").new_fixed_capacity_cache(capacity)
    eager.cache = _filled(eager.cache, empty, position - beginning)
    caches = [cache.refilled(native) for cache, native in zip(empty, eager.cache, strict=True)]
    step = DecodeStep(subject.model, caches).at_rung(rung_for(position + STEPS, capacity))
    compiled, state = mx.compile(step), [cache.state for cache in caches]
    for number, token in enumerate(tokens[beginning:], start=1):
        label = f"step {number} at the far position {position}, {subject.dtype}"
        logits, state = compiled(step.parameters(), state, mx.array([token], mx.int32))
        comparer.check(logits, eager.feed([token]), label)
    after = [cache.with_state(arrays) for cache, arrays in zip(caches, state, strict=True)]
    _compare_written(comparer, after, eager.cache, f"the far position {position}, {subject.dtype}")


def _beginning(subject: Subject, position: int) -> int:
    """Return how many tokens are read: with pooled entries one group more, and as many of the open group as then."""
    period = lcm(*(spec.ratio for spec in specs_of(subject)))
    return BEGINNING + (position - BEGINNING) % period + (period if period > 1 else 0)


@dataclass
class _Parts:
    """A cache of the model's own class, as its parts."""

    caches: list[Any]


def _filled(natives: Sequence[Any], empty: Sequence[FixedCapacityCache], count: int) -> list[Any]:
    """Return caches with `count` random keys and values more; one of the model's own class is made anew."""
    parts = [_Parts(leaves([native])) for native in natives]
    fill([leaf for own in parts for leaf in own.caches], count)
    return [
        native if own_state(native) is None else cache.refilled(own).to_native()
        for native, own, cache in zip(natives, parts, empty, strict=True)
    ]


def fill(natives: Sequence[Any], count: int) -> None:
    """Write `count` random keys and values to each cache that has any."""
    for index, native in enumerate(leaves(natives)):
        if isinstance(native, ArraysCache) or native.keys is None:
            continue
        drawn = []
        for place, held in enumerate((native.keys, native.values)):
            quantized = isinstance(native, QuantizedKVCache)
            like = held[1] if quantized else held
            width = like.shape[-1] * (native.group_size if quantized else 1)
            key = mx.random.key(2 * index + place)
            shape = (*like.shape[:2], count, width)
            drawn.append((_LOUD * mx.random.normal(shape, key=key)).astype(like.dtype))
        native.update_and_fetch(*drawn)


def _compare_written(
    comparer: Comparer, own: Sequence[FixedCapacityCache], natives: Sequence[Any], label: str
) -> None:
    pairs = zip(leaves(cache.to_native() for cache in own), leaves(natives), strict=True)
    for index, (got, want) in enumerate(pairs):
        if isinstance(want, ArraysCache | QuantizedKVCache):
            continue
        for mine, theirs in zip(content(got), content(want), strict=True):
            last = min(STEPS, theirs.shape[2])
            comparer.check(
                mine[..., -last:, :], theirs[..., -last:, :], f"what cache {index} was given at {label}"
            )
