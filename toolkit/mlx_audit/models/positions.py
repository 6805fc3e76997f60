"""Learned positions: a table with a row for each position, beyond which a model reads memory that is not its own."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import mlx.nn as nn

_NAMES = re.compile(r"position|n_ctx|context|seq_len")


def position_rows(model: nn.Module, arguments: Any) -> int | None:
    """Return for how many positions a model has rows, or None where it has no table.

    A table is an embedding whose number of rows is an argument that speaks of positions or of the context's length.

    Args:
        model: A built model.
        arguments: Its resolved arguments; nested ones count.
    """
    sizes = set(_sizes(arguments))
    rows = [
        int(module.weight.shape[0])
        for _, module in model.named_modules()
        if isinstance(module, nn.Embedding | nn.QuantizedEmbedding)
    ]
    return min((count for count in rows if count in sizes), default=None)


def _sizes(arguments: Any, depth: int = 3) -> Iterator[int]:
    items = arguments if isinstance(arguments, dict) else getattr(arguments, "__dict__", {})
    for name, value in items.items():
        if isinstance(value, int) and not isinstance(value, bool) and _NAMES.search(str(name)):
            yield value
        elif depth and (isinstance(value, dict) or hasattr(value, "__dict__")):
            yield from _sizes(value, depth - 1)
