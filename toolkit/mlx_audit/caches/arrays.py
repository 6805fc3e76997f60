"""The fixed-capacity form of mlx-lm's `ArraysCache`: state of a fixed size, replaced by every step."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, Self

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache

from mlx_audit.caches.base import FixedCapacityCache, Role, handle
from mlx_audit.errors import HostState, ShapeMismatch


class FixedCapacityArraysCache(FixedCapacityCache):
    """Arrays of any shape and dtype, such as the state of a convolution and of a recurrence.

    It has no position: what it holds after a token descends from what it held before. A slot that the model never
    fills stays None, and is no part of the state.

    Args:
        arrays: One an entry; the first axis of each is the row.
        capacity: Tokens of the text; the arrays don't grow with it.
    """

    kind = "arrays"
    native = ArraysCache

    lengths: None = None
    left_padding: None = None
    """mlx-lm's marks of padded prompts: a session reads rows of different length one by one, without padding."""

    def __init__(self, arrays: Sequence[mx.array | None], capacity: int) -> None:
        self.cache = list(arrays)
        self.capacity = capacity
        self.rows = next((array.shape[0] for array in arrays if array is not None), 1)

    def __getitem__(self, index: int) -> mx.array | None:
        return self.cache[index]

    def __setitem__(self, index: int, value: mx.array) -> None:
        if self.cache[index] is None:
            raise HostState(
                "an array that prefill left unwritten is written in decode",
                where=f"FixedCapacityArraysCache[{index}]",
                allowed="arrays that the forward writes at every token, or at none",
            )
        self.cache[index] = value

    @property
    def state(self) -> list[mx.array]:
        return [array for array in self.cache if array is not None]

    @property
    def roles(self) -> list[Role]:
        return ["recurrent"] * len(self.state)

    def with_state(self, state: Sequence[mx.array], *, held: int | None = None) -> Self:
        own = self.state
        if len(state) != len(own):
            raise ShapeMismatch(
                "the state has another number of arrays",
                where="FixedCapacityArraysCache.state",
                found=len(state),
                allowed=len(own),
            )
        cache, given = copy.copy(self), iter(state)
        cache.cache = [None if array is None else next(given) for array in self.cache]
        cache.rows = next((array.shape[0] for array in state), self.rows)
        return cache

    def make_mask(self, N: int, **_: Any) -> None:
        """Return None: every token of every row counts."""
        return

    def advance(self, N: int) -> None:
        """Nothing moves but the arrays themselves; models call this after each update."""

    @property
    def batch_size(self) -> int:
        """Rows decoded side by side, by mlx-lm's name."""
        return self.rows

    @classmethod
    def like(cls, native: Any, max_tokens: int) -> Self:
        arrays = [None if array is None else mx.zeros(array.shape, array.dtype) for array in native.cache]
        return cls(arrays, max_tokens)

    @classmethod
    def adopt(cls, native: Any, max_tokens: int) -> Self:
        cls._require_native(native)
        return cls([None if array is None else handle(array) for array in native.cache], max_tokens)

    @classmethod
    def merge(cls, natives: Sequence[Any], max_tokens: int) -> Self:
        for native in natives:
            cls._require_native(native)
            cls._require_form(natives[0].cache, native.cache, rows=1)
        columns = zip(*(native.cache for native in natives), strict=True)
        return cls(
            [None if rows[0] is None else mx.concatenate(list(rows)) for rows in columns], max_tokens
        ).padded()

    def merged(self, natives: Sequence[Any]) -> Self:
        return type(self).merge([self.refilled(native).to_native() for native in natives], self.capacity)

    def padded(self) -> Self:
        cache = copy.copy(self)
        cache.ragged = True
        return cache

    def refilled(self, native: Any) -> Self:
        """Return a cache of this one's form with the arrays of `native`.

        A state that a short prompt has not filled yet (the last n ids, say) is padded in front with zeros, so that its
        shape never changes.
        """
        cache = type(self).adopt(native, self.capacity)
        pairs = zip(cache.cache, self.cache, strict=True)
        cache.cache = [
            array if array is None or like is None else _padded(array, like) for array, like in pairs
        ]
        self._require_form(self.cache, cache.cache)
        return cache

    def to_native(self) -> Any:
        native: Any = ArraysCache(len(self.cache))
        native.cache = [None if array is None else handle(array) for array in self.cache]
        return native

    def count(self) -> None:
        return None

    def trim(self, n: int) -> int:
        """Return 0: a state that has taken a token in cannot give it back."""
        return 0

    def is_trimmable(self) -> bool:
        """Return False, in answer to mlx-lm's question."""
        return False

    def empty(self) -> bool:
        """Return whether nothing was written."""
        return not self.state

    @classmethod
    def _require_form(
        cls, like: Sequence[mx.array | None], arrays: Sequence[mx.array | None], rows: int | None = None
    ) -> None:
        """Refuse arrays whose form depends on the prompt: each step would get another one."""
        counts = {array.shape[0] for array in arrays if array is not None}
        if _forms(arrays) != _forms(like) or (rows is not None and counts - {rows}):
            raise ShapeMismatch(
                "the arrays have another form than those of the empty cache, or of the first row",
                where=f"{cls.__name__}.adopt",
                found=f"{_forms(arrays)} of {sorted(counts)} rows",
                allowed=f"{_forms(like)} of {rows or 'as many'} rows",
            )

    @classmethod
    def _require_native(cls, native: Any) -> None:
        if type(native) is not ArraysCache:
            raise HostState(
                "only mlx-lm's ArraysCache can be adopted",
                where="FixedCapacityArraysCache.adopt",
                found=f"{type(native).__module__}.{type(native).__qualname__}",
                allowed="mlx_lm.models.cache.ArraysCache",
            )
        if native.lengths is not None or native.left_padding is not None:
            raise HostState(
                "the cache still counts the padding of a prompt",
                where="FixedCapacityArraysCache.adopt",
                found=f"lengths {native.lengths}, left_padding {native.left_padding}",
                allowed="None: all tokens read so far were real",
                fix="call finalize() on the native cache after the prompt, or prefill rows one by one",
            )


def _forms(arrays: Sequence[mx.array | None]) -> list[tuple[mx.Dtype, tuple[int, ...]] | None]:
    """Return dtype and shape of each array, rows aside."""
    return [None if array is None else (array.dtype, tuple(array.shape[1:])) for array in arrays]


def _padded(array: mx.array, like: mx.array) -> mx.array:
    """Return an array with zeros in front where it is shorter than `like` along one axis; rows don't count."""
    missing = [want - have for want, have in zip(like.shape[1:], array.shape[1:], strict=False)]
    if array.ndim != like.ndim or sum(map(bool, missing)) != 1 or min(missing) < 0:
        return array
    return mx.pad(array, [(0, 0), *((count, 0) for count in missing)])
