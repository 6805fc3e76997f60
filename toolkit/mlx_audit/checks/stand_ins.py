"""Operations that MLX has not in every dtype, written out from others for as long as a comparison needs them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import mlx.core as mx

from mlx_audit.models.build import DTYPES

GATHER_MM = "gather_mm as gather + matmul"
"""What figures say where the stand-in was used."""


@contextmanager
def swapped(*swaps: tuple[Any, str, Any]) -> Iterator[None]:
    """Put other values in the place of attributes, given as holder, name and value, and take them back."""
    own = [getattr(holder, name) for holder, name, _ in swaps]
    try:
        for holder, name, value in swaps:
            setattr(holder, name, value)
        yield
    finally:
        for (holder, name, _), value in zip(swaps, own, strict=True):
            setattr(holder, name, value)


@contextmanager
def stand_ins_for(dtype: str) -> Iterator[set[str]]:
    """Replace what this backend refuses in a dtype; yields the names of the stand-ins that were called so far."""
    used: set[str] = set()
    if not refuses_gather_mm(dtype):
        yield used
        return

    def gather_mm(*arguments: Any, **options: Any) -> mx.array:
        used.add(GATHER_MM)
        return gather_and_matmul(*arguments, **options)

    with swapped((mx, "gather_mm", gather_mm)):
        yield used


@cache
def refuses_gather_mm(dtype: str) -> bool:
    """Return whether `mx.gather_mm` refuses a dtype here; MLX says so only when it evaluates."""
    one = mx.ones((1, 1, 1), DTYPES[dtype])
    try:
        mx.eval(mx.gather_mm(one, one, rhs_indices=mx.array([0])))
    except (RuntimeError, ValueError):
        return True
    return False


def gather_and_matmul(
    a: mx.array,
    b: mx.array,
    lhs_indices: mx.array | None = None,
    rhs_indices: mx.array | None = None,
    *,
    stream: Any = None,
    **_: Any,
) -> mx.array:
    """Return what `mx.gather_mm` gives, in any dtype: the product of chosen matrices of `a` and of `b`.

    Args:
        a: `[…, M, K]`; the index counts over all leading axes.
        b: `[…, K, N]`, likewise.
        lhs_indices, rhs_indices: Which matrices to take; all of them, in order, by default.
        stream: Where to run; `sorted_indices` is a hint that changes no result.

    Returns:
        `[indices…, M, N]`.
    """
    with mx.stream(stream or mx.default_stream(mx.default_device())):
        return _chosen(a, lhs_indices) @ _chosen(b, rhs_indices)


def _chosen(matrices: mx.array, indices: mx.array | None) -> mx.array:
    if indices is None:
        return matrices
    return mx.take(mx.reshape(matrices, (-1, *matrices.shape[-2:])), indices, axis=0)
