"""Cache state compared with what the model's own caches hold, and what one step may write."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import ArraysCache

from mlx_audit.caches import FixedCapacityCache, host_float, host_int
from mlx_audit.checks.base import CheckFailed
from mlx_audit.checks.content import content, leaves, own_state, readable, rounding
from mlx_audit.checks.parts import PartSpec, named_parts, parts_of
from mlx_audit.checks.subject import Subject
from mlx_audit.checks.tolerance import Tolerance, largest, largest_difference
from mlx_audit.decode import CompiledDecodeSession


def compare_states(subject: Subject, session: CompiledDecodeSession, natives: list[Any], label: str) -> float:
    """Compare a session's caches with native ones and return the largest difference.

    Raises:
        CheckFailed: names the cache and the token or array.
    """
    wanted = leaves(natives)
    parts = parts_of(session.caches, [PartSpec.of(native) for native in wanted])
    handed = [cache.to_native() for cache in session.caches]
    pairs = zip(parts, leaves(handed), wanted, strict=True)
    worst = [_compare(subject.tolerance, part.name, got, want, label) for part, got, want in pairs]
    for index, (got, want) in enumerate(zip(handed, natives, strict=True)):
        worst.append(_compare_own(subject.tolerance, f"caches[{index}]", got, want, label))
    return max(worst, default=0.0)


def _compare_own(tolerance: Tolerance, name: str, own: Any, native: Any, label: str) -> float:
    """Compare two caches of the model's own class by what that class says, not by the parts that stand for it."""
    got, want = own_state(own), own_state(native)
    if got is None or want is None:
        return 0.0
    forms = [
        [None if array is None else (array.shape, array.dtype) for array in arrays] for arrays in (got, want)
    ]
    if forms[0] != forms[1]:
        raise CheckFailed(f"{name} holds {forms[0]} at {label}, eager holds {forms[1]}")
    worst = 0.0
    for index, (mine, theirs) in enumerate(zip(got, want, strict=True)):
        if mine is None or theirs is None:
            continue
        if not _same(tolerance, mine, theirs, 0.0):
            raise CheckFailed(
                f"{name} differs from eager's at {label}, array {index} of its state, by "
                f"{largest_difference(mine, theirs):.3g}",
                where=f"{label}, {name}, array {index}",
            )
        worst = max(worst, largest_difference(mine, theirs))
    return worst


def _compare(tolerance: Tolerance, name: str, own: Any, native: Any, label: str) -> float:
    """Compare what two mlx-lm caches hold; where sums may differ in order, a quantized number may be its neighbour."""
    read = readable if tolerance.relative else content
    pairs = list(zip(read(own), read(native), strict=False))
    if len(read(own)) != len(read(native)):
        raise CheckFailed(f"{name} holds {len(read(own))} arrays at {label}, eager holds {len(read(native))}")
    worst = 0.0
    for index, (got, want) in enumerate(pairs):
        if isinstance(native, ArraysCache):
            want = filled(want, got)
        if got.shape != want.shape:
            raise CheckFailed(f"{name} holds {got.shape} at {label}, eager holds {want.shape}")
        if got.dtype != want.dtype:
            raise CheckFailed(f"{name} holds {got.dtype} at {label}, eager holds {want.dtype}")
        if not _same(tolerance, got, want, rounding(native)[index] if tolerance.relative else 0.0):
            gap = mx.abs(got.astype(mx.float32) - want.astype(mx.float32))
            what = _place(native, gap, index)
            raise CheckFailed(
                f"{name} differs from eager's at {label}, {what}, by {largest(gap):.3g}",
                where=f"{label}, {name}, {what}",
            )
        worst = max(worst, largest_difference(got, want))
    return worst


def filled(want: mx.array, like: mx.array) -> mx.array:
    """Return a state that a short prompt has not filled yet as a fixed shape holds it: with zeros in front."""
    missing = [have - own for have, own in zip(like.shape, want.shape, strict=False)]
    if like.ndim != want.ndim or min(missing, default=0) < 0 or sum(map(bool, missing)) != 1:
        return want
    return mx.pad(want, [(count, 0) for count in missing])


def _place(native: Any, gap: mx.array, index: int) -> str:
    """Return where two caches differ most: a slot; the place in time of what a ring holds; or an array of a state."""
    if isinstance(native, ArraysCache):
        return f"array {index}"
    at = host_int(mx.argmax(mx.max(gap, axis=(0, 1, 3))))
    return f"slot {at}" if PartSpec.of(native).ring is None else f"token {at} of {gap.shape[2]} held"


def _same(tolerance: Tolerance, got: mx.array, want: mx.array, slack: mx.array | float) -> bool:
    if not mx.issubdtype(got.dtype, mx.floating):
        return bool(mx.array_equal(got, want).item())
    gap = mx.abs(got.astype(mx.float32) - want.astype(mx.float32)) - slack
    return not got.size or host_float(mx.max(gap)) <= tolerance.relative * max(largest(want), 1e-30)


def require_one_slot_written(
    before: Sequence[FixedCapacityCache], after: Sequence[FixedCapacityCache], label: str
) -> None:
    """Require that a step wrote each part where it must, and nowhere else.

    In slots, exactly the one at the write index; of a state, at least one array; a cache that the forward never
    writes stays empty. A buffer that is zero before and after is not in use.

    Raises:
        CheckFailed: nothing changed ("state unchanged by a step"), or another slot did.
    """
    for (name, old), (_, new) in zip(named_parts(before), named_parts(after), strict=True):
        where, arrays = f"{label}, {name}", list(zip(old.state, new.state, old.roles, strict=True))
        written = {slot for was, now, role in arrays if role == "buffer" for slot in _changed_slots(was, now)}
        replaced = any(role == "recurrent" and _changed(was, now) for was, now, role in arrays)
        if arrays and not written and not replaced:
            raise CheckFailed(f"state unchanged by a step ({where})", where=where)
        if old.slots and written != {slot := host_int(old.slot)}:  # type: ignore[attr-defined]
            raise CheckFailed(
                f"{label} wrote slots {sorted(written)} of {name}, wanted {slot} alone", where=where
            )


def _changed(was: mx.array, now: mx.array) -> bool:
    same = mx.array_equal(mx.view(was, mx.uint8), mx.view(now, mx.uint8))
    return bool(was.size) and not bool(same.item())


def _changed_slots(was: mx.array, now: mx.array) -> Iterator[int]:
    if not was.size:
        return iter(())
    changed = np.array(mx.any(mx.view(was, mx.uint8) != mx.view(now, mx.uint8), axis=(0, 1, 3)))
    return (int(slot) for slot in np.flatnonzero(changed))
