"""Learned positions: a table with a row for each position, beyond which a model reads memory that is not its own."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_audit.errors import CapacityExceeded

_NAMES = re.compile(r"position|n_ctx|context|seq_len")
_TABLES = re.compile(r"cos|sin|pos|rot|freq|table|wpe")


def require_rows(model: nn.Module, arguments: Any, max_tokens: int) -> None:
    """Refuse a capacity beyond a table of positions.

    Raises:
        CapacityExceeded: with the number of rows.
    """
    rows = position_rows(model, arguments)
    if rows is not None and max_tokens > rows:
        raise CapacityExceeded(
            "the model has a table of positions with fewer rows; beyond it MLX reads foreign memory",
            found=f"max_tokens={max_tokens}",
            allowed=f"at most {rows}",
        )


def position_rows(model: nn.Module, arguments: Any) -> int | None:
    """Return for how many positions a model has rows, or None where it has no table.

    A table is an embedding, or an array that one of the model's own classes keeps under a name that speaks of positions
    or rotations, with as many rows as an argument states that speaks of positions or of the context's length.

    Args:
        model: A built model.
        arguments: Its resolved arguments; nested ones count.
    """
    sizes = set(_sizes(arguments))
    return min(
        (count for module in model.modules() for count in _rows(module) if count in sizes), default=None
    )


def _rows(module: nn.Module) -> Iterator[int]:
    if isinstance(module, nn.Embedding | nn.QuantizedEmbedding):
        yield int(module.weight.shape[0])
    elif not type(module).__module__.startswith("mlx."):
        for name, value in (*module.items(), *vars(module).items()):
            if isinstance(value, mx.array) and value.ndim > 1 and _TABLES.search(name):
                yield from value.shape[:-1]


def _sizes(arguments: Any, depth: int = 3) -> Iterator[int]:
    items = arguments if isinstance(arguments, dict) else getattr(arguments, "__dict__", {})
    for name, value in items.items():
        if isinstance(value, int) and not isinstance(value, bool) and _NAMES.search(str(name)):
            yield value
        elif depth and (isinstance(value, dict) or hasattr(value, "__dict__")):
            yield from _sizes(value, depth - 1)
