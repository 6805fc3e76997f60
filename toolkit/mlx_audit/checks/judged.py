"""Whose fault it is: what one cache holds, and what a mask shows of it, against what they must."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from mlx_audit.caches import FixedCapacityCache
from mlx_audit.checks.compared import filled
from mlx_audit.checks.parts import Part, PartSpec
from mlx_audit.checks.subject import Subject
from mlx_audit.checks.tolerance import largest, tolerance_for
from mlx_audit.evidence.environment import backend

_HIDDEN = -1e3
"""What an additive mask gives to a slot that it hides, or less."""

_SHOWN = 4
"""Most slots that a text names."""

Slack = mx.array | float


@dataclass(frozen=True)
class Finding:
    """What is wrong with one cache.

    Attributes:
        consumer: `write`, `RoPE`, `mask` or `state`.
        slot: Slot of the buffer, or array of a recurrent state; None where no single one is meant.
        detail: Got and wanted.
    """

    consumer: str
    slot: int | None
    detail: str = ""


@dataclass(frozen=True)
class Threshold:
    """When two arrays are apart, relative to the largest wanted value: more than another order of sums makes."""

    relative: float

    @classmethod
    def of(cls, subject: Subject) -> Threshold:
        """Return the threshold of a subject on this backend."""
        return cls(tolerance_for("reordered", subject.dtype, backend()).relative)

    def __call__(self, got: mx.array, want: mx.array, slack: Slack = 0.0) -> bool:
        return got.shape != want.shape or bool(mx.any(self._gap(got, want, slack) > 0).item())

    def tokens(self, got: mx.array, want: mx.array, slack: Slack) -> list[bool]:
        """Return which tokens differ, of two arrays `[B, heads, tokens, width]`."""
        gap = self._gap(got, want, slack) > 0
        return [bool(token) for token in np.array(mx.any(gap, axis=(0, 1, 3)))]

    def rotated(self, got: mx.array, want: mx.array, slack: Slack) -> bool:
        """Return whether vectors differ by a rotation at most: their lengths agree."""
        lengths = [mx.linalg.norm(array.astype(mx.float32), axis=-1) for array in (got, want)]
        return not self(
            lengths[0], lengths[1], mx.linalg.norm(slack, axis=-1) if isinstance(slack, mx.array) else 0.0
        )

    def _gap(self, got: mx.array, want: mx.array, slack: Slack) -> mx.array:
        gap = mx.abs(got.astype(mx.float32) - want.astype(mx.float32)) - slack
        gap = gap - self.relative * max(largest(want), 1e-30)
        return mx.where(mx.isnan(gap), mx.inf, gap)


def held_tokens(
    part: Part, want: Sequence[mx.array], slack: Sequence[Slack], position: int, apart: Threshold
) -> Finding | None:
    """Return what is wrong with what a cache holds, read from its buffers where each token must be.

    Args:
        part: The cache.
        want: What eager decoding's holds, in the order of time: keys and values, or the arrays of a state.
        slack: What of it rounding may move.
        position: Tokens of the text.
        apart: When two arrays differ.
    """
    if part.spec.kind == "arrays":
        return _state(part.cache.state, want, apart)
    if not part.slotted:
        return None
    if not want:
        return Finding("write", None, "eager decoding writes no such cache")
    times = _times(part.spec, want[0].shape[2], position)
    got = _read(part, times)
    keys, values = (apart.tokens(*three) for three in zip(got, want, slack, strict=True))
    wrong = [index for index in range(len(times)) if keys[index] or values[index]]
    if wrong:
        slot, only_keys = part.spec.slot(times[wrong[0]], part.cache.slots), not any(values)
        if only_keys and apart.rotated(got[0], want[0], slack[0]):
            return Finding("RoPE", slot, "the keys are turned by another angle, the values agree")
        what = (
            "the keys differ" if only_keys else "keys and values differ" if any(keys) else "the values differ"
        )
        return Finding("write", slot, what)
    count = part.cache.count()
    if count != position:
        slot = part.spec.slot(position, part.cache.slots)
        return Finding("write", slot, f"the position that the next token takes is {count}, wanted {position}")
    return None


def judge_write(
    old: Part, new: Part, want: Sequence[mx.array], slack: Sequence[Slack], position: int, apart: Threshold
) -> Finding | None:
    """Return what is wrong with what one step wrote to a cache.

    Args:
        old, new: The cache before and after.
        want, slack, apart: As for `held_tokens`.
        position: Where the token stands in the text.
    """
    found = held_tokens(new, want, slack, position + 1, apart)
    if new.spec.kind == "arrays" or not new.slotted:
        return found
    slot = new.spec.slot(position, new.cache.slots)
    keys, values = _changed(old.cache, new.cache)
    others = sorted((keys | values) - {slot})
    if others:
        instead = "too" if slot in keys | values else "instead"
        return Finding("write", slot, f"{_slots(others)} {instead}")
    if found is None or found.slot != slot:
        return found
    missing = [name for name, slots in (("keys", keys), ("values", values)) if slot not in slots]
    if missing:
        what = "nothing was written" if len(missing) == 2 else f"the {missing[0]} were not written"
        return Finding("write", slot, what)
    return found


def judge_mask(part: Part, masks: Sequence[mx.array], position: int) -> Finding | None:
    """Return the first token that a mask shows or hides wrongly, or None where it shows the right ones.

    Args:
        part: The cache before the step.
        masks: Arrays that the layer was given; without one of the right width, the cache's own mask counts.
        position: Where the token stands in the text.
    """
    slots = part.cache.slots
    fitting = [mask for mask in masks if mask.ndim >= 2 and mask.shape[-1] in (slots, part.cache.extent)]
    mask = fitting[0] if fitting else part.cache.make_mask(1)  # type: ignore[attr-defined]
    row = np.array(mx.reshape(mask, (-1, mask.shape[-1]))[0].astype(mx.float32))
    seen = row > 0 if mask.dtype == mx.bool_ else row > _HIDDEN
    shown = {int(slot) for slot in np.flatnonzero(seen)}
    times = {part.spec.slot(time, slots): time for time in range(position + 1)}
    wanted = {part.spec.slot(time, slots) for time in part.spec.visible(position)}
    for slot in sorted(shown ^ wanted):
        token = f"token {times[slot]}" if slot in times else "a slot that holds no token yet"
        return Finding("mask", slot, f"{token} is {'shown' if slot in shown else 'hidden'}")
    return None


def _state(got: Sequence[mx.array], want: Sequence[mx.array], apart: Threshold) -> Finding | None:
    for index, (own, other) in enumerate(zip(got, want, strict=False)):
        if apart(own, filled(other, own)):
            return Finding("state", index)
    if len(got) != len(want):
        return Finding("state", None, f"it holds {len(got)} arrays, wanted {len(want)}")
    return None


def _times(spec: PartSpec, count: int, position: int) -> list[int]:
    """Return the times of the tokens that a cache holds: those kept, and the latest; the last of each closed group."""
    if spec.kind == "pooled":
        return [time for time in range(position) if (time + 1) % spec.ratio == 0]
    kept = min(spec.keep, count)
    return [*range(kept), *range(position - (count - kept), position)]


def _read(part: Part, times: Sequence[int]) -> list[mx.array]:
    """Return keys and values of the tokens of those times, from the slots that must hold them."""
    slots = mx.array([part.spec.slot(time, part.cache.slots) for time in times], mx.int32)
    arrays = [mx.take(buffer, slots, axis=2) for buffer in _buffers(part.cache)]
    if part.spec.kind != "quantized":
        return arrays
    halves = ((arrays[0], arrays[1], arrays[2]), (arrays[3], arrays[4], arrays[5]))
    size, bits = part.spec.group_size, part.spec.bits
    return [mx.dequantize(packed, scales, biases, size, bits) for packed, scales, biases in halves]


def _changed(old: FixedCapacityCache, new: FixedCapacityCache) -> tuple[set[int], set[int]]:
    """Return the slots of the keys, and those of the values, that differ in any bit."""
    changed = []
    for was, now in zip(_buffers(old), _buffers(new), strict=True):
        if was.shape != now.shape or was.dtype != now.dtype:
            changed.append(set(range(now.shape[2])))
            continue
        bits = mx.view(was, mx.uint8) != mx.view(now, mx.uint8)
        changed.append({int(slot) for slot in np.flatnonzero(np.array(mx.any(bits, axis=(0, 1, 3))))})
    half = len(changed) // 2
    return set().union(*changed[:half]), set().union(*changed[half:])


def _buffers(cache: FixedCapacityCache) -> list[mx.array]:
    return [array for array, role in zip(cache.state, cache.roles, strict=True) if role == "buffer"]


def _slots(slots: Sequence[int]) -> str:
    named = ", ".join(map(str, slots[:_SHOWN])) + (", …" if len(slots) > _SHOWN else "")
    return f"slot {named} was written" if len(slots) == 1 else f"slots {named} were written"
