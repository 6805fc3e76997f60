"""The constants of a traced graph, with their values: a frozen position is often just a scalar among them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import mlx.core as mx
import numpy as np

_MOST_READ = 1 << 20


@dataclass(frozen=True, slots=True)
class Constant:
    """A constant's form and value; `data` is None where it cannot be read, which makes it a leaked placeholder."""

    shape: tuple[int, ...]
    dtype: str
    data: bytes | None
    identity: int = 0
    """Tells apart arrays too large to read; 0 where `data` says it all."""

    @property
    def leaked(self) -> bool:
        """Whether the array belongs to another trace, and so has no value."""
        return self.data is None

    def __str__(self) -> str:
        if self.data is None:
            return f"{self.dtype}{list(self.shape)} without a value (a leaked placeholder)"
        if self.identity:
            return f"{self.dtype}{list(self.shape)}"
        return f"{self.dtype}{list(self.shape)} {_text(self)}"


def read_constant(array: mx.array) -> Constant:
    """Return an array's form and value, without letting a placeholder's error through."""
    shape, dtype = tuple(array.shape), dtype_name(array.dtype)
    if array.size > _MOST_READ:
        return Constant(shape, dtype, b"", identity=id(array))
    try:
        plain = mx.view(array, mx.uint16) if array.dtype == mx.bfloat16 else array
        return Constant(shape, dtype, np.array(plain).tobytes())
    except (ValueError, RuntimeError):
        return Constant(shape, dtype, None)


@cache
def dtype_name(dtype: mx.Dtype) -> str:
    """Return `float32` for `mlx.core.float32`."""
    return str(dtype).removeprefix("mlx.core.")


def _text(constant: Constant) -> str:
    if constant.dtype == "bfloat16":
        words = np.frombuffer(constant.data or b"", np.uint16).astype(np.uint32) << 16
        values = words.view(np.float32)
    else:
        names = {"bool": np.bool_}
        values = np.frombuffer(constant.data or b"", names.get(constant.dtype, constant.dtype))
    shown = ", ".join(str(value) for value in values[:4].tolist())
    return f"{shown}, …" if values.size > 4 else shown
