"""What slotted caches refuse, each with what was found and what is allowed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import mlx.core as mx

from mlx_audit.caches.base import FixedCapacityCache
from mlx_audit.errors import CapacityExceeded, HostState, ShapeMismatch


def require_slots(cls: type, found: int, slots: int) -> None:
    """Refuse buffers that hold another number of tokens than the cache counts with; none are allowed."""
    if found not in (0, slots):
        raise ShapeMismatch(
            "the buffers have another number of slots than the capacity asks for",
            where=cls.__name__,
            found=found,
            allowed=slots,
        )


def require_integers(cls: type, array: mx.array, count: int) -> None:
    """Refuse a position or time that is not int32 of shape `[count]`."""
    if array.dtype != mx.int32 or array.shape != (count,):
        raise ShapeMismatch(
            "the position has the wrong form",
            where=cls.__name__,
            found=f"{array.dtype} {array.shape}",
            allowed=f"int32 of shape ({count},)",
        )


def require_layout(cls: type, buffers: Sequence[mx.array], own: Sequence[mx.array]) -> None:
    """Refuse buffers of other slots, heads or widths; only the number of rows is free, the same for all."""
    wanted = [array.shape[1:] for array in own]
    if [a.shape[1:] for a in buffers] != wanted or any(a.shape[0] != buffers[0].shape[0] for a in buffers):
        raise ShapeMismatch(
            "the state belongs to another capacity, or to another model",
            where=f"{cls.__name__}.state",
            found=[array.shape for array in buffers],
            allowed=[("B", *shape) for shape in wanted],
        )


def require_fitting(cls: type, new: Sequence[mx.array], buffers: Sequence[mx.array]) -> None:
    """Refuse an update that MLX would broadcast into the buffers, or write beside them."""
    if not buffers:
        raise HostState(
            "a cache that prefill left unwritten is written in decode",
            where=cls.__name__,
            allowed="caches that the forward writes at every token, or at none",
        )
    length = new[0].shape[2] if new[0].ndim == 4 else None
    wanted = [(*buffer.shape[:2], length, buffer.shape[3]) for buffer in buffers]
    if [array.shape for array in new] != wanted:
        raise ShapeMismatch(
            "the keys or values to write have the wrong shape",
            where=f"{cls.__name__}.update_and_fetch",
            found=", ".join(str(array.shape) for array in new),
            allowed=", ".join(f"[{b.shape[0]}, {b.shape[1]}, L, {b.shape[3]}]" for b in buffers),
        )


def require_alike(cls: type, rows: Sequence[Sequence[mx.array]]) -> None:
    """Refuse buffers that are not those of rows of one batch: each of one row, and all written or none."""
    forms = [[(array.shape[0], array.shape[1], array.shape[3]) for array in buffers] for buffers in rows]
    if any(form != forms[0] or any(shape[0] != 1 for shape in form) for form in forms):
        raise ShapeMismatch(
            "the caches are not rows of one batch",
            where=f"{cls.__name__}.merge",
            found=[[array.shape for array in buffers] for buffers in rows],
            allowed="one row each, of equal heads and widths, all of them written or none",
        )


def require_native(cls: type[FixedCapacityCache], native: object, max_tokens: int) -> int:
    """Return the tokens that a native cache holds; refuse another class, and more tokens than the capacity."""
    if type(native) is not cls.native:
        raise HostState(
            f"only mlx-lm's {cls.native.__name__} can be adopted",
            where=f"{cls.__name__}.adopt",
            found=f"{type(native).__module__}.{type(native).__qualname__}",
            allowed=f"{cls.native.__module__}.{cls.native.__qualname__}",
        )
    held = int(cast(Any, native).offset)
    if held > max_tokens:
        raise CapacityExceeded(
            "the native cache holds more tokens than the capacity",
            where=f"{cls.__name__}.adopt",
            found=held,
            allowed=max_tokens,
            fix=f"use max_tokens of {held} or more",
        )
    return held
