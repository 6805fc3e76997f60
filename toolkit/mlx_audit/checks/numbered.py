"""Texts of numbered tokens, written to one cache: what it shows tells which tokens it holds."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_audit.checks.base import CheckFailed
from mlx_audit.checks.parts import PartSpec


@dataclass
class NumberedText:
    """A text of numbered tokens on one cache; a token that was taken back keeps its number, the next gets a new one.

    Attributes:
        spec: What the cache must be.
        tokens: Number of the token of each time.
    """

    spec: PartSpec
    tokens: list[int] = field(default_factory=list)
    _new: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    def copy(self) -> NumberedText:
        """Return an equal text that goes on by itself; the numbers of further tokens are new to both."""
        return replace(self, tokens=list(self.tokens))

    @property
    def label(self) -> str:
        """The cache, in words."""
        return self.spec.label

    def more(self, count: int) -> tuple[mx.array, mx.array]:
        """Return keys and values `[1, 1, count, width]` of the next tokens; constant rows survive quantization."""
        numbers = list(itertools.islice(self._new, count))
        self.tokens += numbers
        column = mx.reshape(mx.array(numbers, mx.float32), (1, 1, count, 1))
        keys = mx.broadcast_to(column, (1, 1, count, self.spec.group_size or 1))
        return keys, -keys

    def numbers(self, fetched: Any, sign: int) -> list[int]:
        """Return which tokens keys or values hold, in the order of their columns; 0 where there is none."""
        if self.spec.kind == "quantized":
            packed, scales, biases = fetched
            fetched = mx.dequantize(packed, scales, biases, self.spec.group_size, self.spec.bits)
        # That slots without a token are finite is what MSK002 asks.
        rows = np.nan_to_num(np.array(fetched)[0, 0], posinf=0.0, neginf=0.0)
        if rows.size and (rows != rows[:, :1]).any():
            raise CheckFailed(f"{self.label}: what is read is not what was written")
        return [round(sign * float(row[0])) for row in rows]

    def times(self, numbers: list[int]) -> list[int | str]:
        """Return the times of tokens, in order; a slot that holds none, or a forgotten one, is named as such."""
        known: dict[int, int | str] = {number: time for time, number in enumerate(self.tokens)}
        return [known.get(number, "forgotten" if number else "unwritten") for number in numbers]


def require_right(cache: Any, text: NumberedText, length: int, narrow: int) -> int:
    """Write the next tokens, compare what each sees with what it must see, and return how many masks were looked at."""
    now = len(text.tokens)
    asked = {window: cache.make_mask(length, window_size=window) for window in (None, narrow)}
    keys, values = cache.update_and_fetch(*text.more(length))
    mx.eval(list(asked.values()), keys, values)  # at once, which is many times faster than one by one
    masks = {window: np.array(mask) for window, mask in asked.items()}
    columns, label = text.numbers(keys, 1), text.label
    if text.numbers(values, -1) != columns:
        raise CheckFailed(f"{label}: at position {now} keys and values of different tokens are read together")
    for window, mask in masks.items():
        shape = (1, 1, length, len(columns))
        if mask.shape != shape or mask.dtype != np.bool_:
            raise CheckFailed(
                f"{label}: the mask is {mask.dtype}{list(mask.shape)}, wanted bool{list(shape)} for the keys read"
            )
        for query in range(length):
            got = sorted(columns[column] for column in np.flatnonzero(mask[0, 0, query]))
            want = text.spec.visible(now + query, window)
            if got != [text.tokens[time] for time in want]:
                raise CheckFailed(
                    f"{label}: at position {now} the mask of query {query} (window {window}) shows tokens "
                    f"{text.times(got)}, wanted {want}",
                    where=f"{label}, position {now}, query {query}",
                )
    return len(masks)
