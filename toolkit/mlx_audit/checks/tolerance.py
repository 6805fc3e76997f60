"""What two runs may differ by: from the exactness class, the dtype and the backend, in one place."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from mlx_audit.caches import host_float

_REORDERED = {"float32": 1e-4, "bfloat16": 6e-2, "float16": 1e-2}
"""Relative to the largest logit: the same terms summed in another order."""

_KERNEL = {"float32": 1e-3, "bfloat16": 1e-1, "float16": 2e-2}
"""Relative to the largest logit: another kernel computed the same thing."""


_SMALLEST = 1e-30
"""What the largest reference value counts as where all are zero."""


@dataclass(frozen=True)
class Tolerance:
    """A bound on the largest difference, relative to the largest reference value; 0 means bit-equal values."""

    relative: float
    name: str

    def accepts(self, got: mx.array, want: mx.array) -> bool:
        """Return whether all of `got` is finite and within the bound of `want`."""
        difference, size = largest_difference(got, want), largest(want)
        return bool(np.isfinite(difference)) and difference <= self.relative * max(size, _SMALLEST)


def tolerance_for(exactness: str, dtype: str, backend: str) -> Tolerance:
    """Return the bound of a variant.

    The declared class binds on the CPU; on other backends it is `kernel` until a record made there shows better.
    """
    name = exactness if backend == "cpu" else "kernel"
    tables = {"reordered": _REORDERED, "kernel": _KERNEL}
    return Tolerance(tables[name][dtype] if name in tables else 0.0, name)


def largest_difference(got: mx.array, want: mx.array) -> float:
    """Return the largest absolute difference; infinity where shapes differ, or one is not a number."""
    if got.shape != want.shape:
        return float("inf")
    gap = mx.abs(got.astype(mx.float32) - want.astype(mx.float32))
    difference = host_float(mx.max(gap)) if got.size else 0.0
    return difference if np.isfinite(difference) else float("inf")


def relative_difference(got: mx.array, want: mx.array) -> float:
    """Return the smallest relative tolerance that accepts `got`."""
    return largest_difference(got, want) / max(largest(want), _SMALLEST)


def largest(array: mx.array) -> float:
    """Return the largest absolute value."""
    return host_float(mx.max(mx.abs(array.astype(mx.float32)))) if array.size else 0.0
