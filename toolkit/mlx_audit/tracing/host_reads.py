"""Reads of a traced array's value: MLX raises, but model code may swallow the exception and go on with a constant."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import mlx.core as mx
import mlx.nn as nn

import mlx_audit
from mlx_audit.tracing.paths import short_path

_READS = ("item", "tolist", "__int__", "__float__", "__bool__", "__index__", "__array__", "__format__")


@contextmanager
def watched(seen: list[str]) -> Iterator[None]:
    """Note in `seen` each read of an array that MLX refused, as `file:line: read`; puts MLX back as it was."""
    originals = {name: getattr(mx.array, name) for name in _READS}
    for name, original in originals.items():
        setattr(mx.array, name, _watch(name, original, seen))
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(mx.array, name, original)


def _watch(name: str, original: Callable[..., Any], seen: list[str]) -> Callable[..., Any]:
    def read(array: mx.array, *arguments: Any, **options: Any) -> Any:
        try:
            return original(array, *arguments, **options)
        except ValueError as error:
            if "function transformations" in str(error):
                seen.append(f"{_caller()}: {name.strip('_')}()")
            raise

    return read


def _caller() -> str:
    """Return `file:line` of the innermost frame outside mlx-audit and MLX."""
    own, framework = Path(mlx_audit.__file__).parent, Path(nn.__file__).parents[1]
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if not path.is_relative_to(own) and not path.is_relative_to(framework):
            return f"{short_path(path)}:{frame.f_lineno}"
        frame = frame.f_back
    return "somewhere"
