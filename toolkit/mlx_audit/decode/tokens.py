"""Token ids as the caller gives them, checked on the host before anything is dispatched."""

from __future__ import annotations

import operator
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_audit.errors import ShapeMismatch


def integers(values: Any, where: str) -> list[int]:
    """Return `values` as a list of Python ints.

    Raises:
        ShapeMismatch: not a collection, or something in it is no integer.
    """
    try:
        listed = list(values)
        if any(isinstance(value, bool) for value in listed):
            raise TypeError("a bool")
        return [operator.index(value) for value in listed]
    except TypeError as error:
        raise ShapeMismatch("integers are needed", where=where, found=error, allowed="integers") from error


def token_array(tokens: Any, *, shape: tuple[int, int | None], vocabulary: int, call: str) -> mx.array:
    """Return `tokens` as an int32 array.

    MLX looks token ids up without a range check, so an id outside the vocabulary would read foreign memory.

    Args:
        tokens: Nested lists of ints, or an integer array of NumPy or MLX.
        shape: `(B, L)`; `L` None stands for any length from 1. For single tokens, `(B, 1)` also takes `[B]`.
        vocabulary: Ids run from 0 to `vocabulary - 1`.
        call: Name of the public method, for messages.

    Raises:
        ShapeMismatch: wrong shape, dtype or value.
    """
    batch, length = shape
    allowed = (
        f"integers of shape ({batch},)"
        if length == 1
        else f"integers of shape ({batch}, {length or 'L ≥ 1'})"
    )
    try:
        array = np.asarray(tokens)
    except Exception as error:
        raise ShapeMismatch(
            "the tokens are not a rectangular array of ids",
            where=f"{call}(tokens)",
            found=str(error),
            allowed=allowed,
        ) from error
    if array.dtype.kind not in "iu" or _has_bool(tokens):
        raise ShapeMismatch(
            "token ids must be integers",
            where=f"{call}(tokens)",
            found=f"dtype {array.dtype}" if array.dtype.kind not in "iu" else "a bool among them",
            allowed=allowed,
        )
    wanted = (batch,) if length == 1 else (batch, length or array.shape[-1] if array.ndim else 0)
    if array.shape != wanted or array.size == 0:
        raise ShapeMismatch(
            "the tokens have the wrong shape", where=f"{call}(tokens)", found=array.shape, allowed=allowed
        )
    low, high = int(array.min()), int(array.max())
    if low < 0 or high >= vocabulary:
        raise ShapeMismatch(
            "a token id is outside the vocabulary",
            where=f"{call}(tokens)",
            found=low if low < 0 else high,
            allowed=f"0 to {vocabulary - 1}",
        )
    return mx.array(array.astype(np.int32))


def _has_bool(tokens: Any) -> bool:
    """Return whether a bool hides among the ints of nested lists; NumPy would take it for 0 or 1."""
    if isinstance(tokens, list | tuple):
        return any(type(item) is bool or _has_bool(item) for item in tokens if type(item) is not int)
    return False
