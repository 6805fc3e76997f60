"""Which tokens a cache must show, told by a plain list of token ids; what the tests of every cache kind share."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import (
    CacheList,
    ChunkedKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
)

from mlx_audit.caches import FixedCapacityCache, cache_class

HEADS = 2
WIDTHS = (3, 5)
GROUP = 32

Ids = list[list[int]]
"""Token ids, one list a row."""


@dataclasses.dataclass(frozen=True)
class Kind:
    """A cache kind with its parameters.

    Attributes:
        visible: From a token's position and the window asked for, to the positions that it sees.
        span: Slots of a ring at most.
        of: The parts of a composite one.
    """

    name: str
    native: Callable[[], Any]
    visible: Callable[[int, int | None], Sequence[int]] = lambda at, window: []
    span: int | None = None
    widths: tuple[int, int] = WIDTHS
    of: tuple[Kind, ...] = ()

    @property
    def cls(self) -> type[FixedCapacityCache]:
        cls = cache_class(self.name)
        assert cls is not None
        return cls

    @property
    def parts(self) -> list[Kind]:
        return [part for kind in self.of for part in kind.parts] if self.of else [self]

    def can_forget(self, n: int, lengths: Sequence[int], capacity: int) -> bool:
        """Return whether all that is left after forgetting `n` tokens of each row is still there."""
        spans = [part.span for part in self.parts if part.span is not None]
        return 0 <= n <= min(lengths) and (not n or all(max(lengths) <= min(s, capacity) for s in spans))


def linear() -> Kind:
    return Kind("linear", KVCache, _causal)


def quantized(bits: int) -> Kind:
    return Kind("quantized", lambda: QuantizedKVCache(GROUP, bits), _causal, widths=(GROUP, 2 * GROUP))


def rotating(window: int, keep: int = 0) -> Kind:
    def visible(at: int, asked: int | None) -> list[int]:
        latest = min(window - keep, asked or window)
        return sorted({*range(min(keep, at + 1)), *range(max(0, at - latest + 1), at + 1)})

    return Kind("rotating", lambda: RotatingKVCache(window, keep), visible, span=window)


def chunked(chunk: int) -> Kind:
    def visible(at: int, asked: int | None) -> range:
        return range(max(at // chunk * chunk, at + 1 - (asked or chunk)), at + 1)

    return Kind("chunked", lambda: ChunkedKVCache(chunk), visible, span=chunk)


def composite(*kinds: Kind) -> Kind:
    return Kind("composite", lambda: CacheList(*(kind.native() for kind in kinds)), of=kinds)


def _causal(at: int, asked: int | None) -> range:
    return range(0 if asked is None else max(0, at - asked + 1), at + 1)


def marks(ids: Ids, widths: tuple[int, int], dtype: mx.Dtype = mx.float32) -> tuple[mx.array, mx.array]:
    """Return keys and values `[B, HEADS, L, width]` whose every element tells the token id and the head."""
    mark = np.array(ids)[:, None, :, None] * np.array([1, 2])[None, :, None, None]
    keys, values = (
        mx.array(np.broadcast_to(sign * mark, (*mark.shape[:3], width))).astype(dtype)
        for sign, width in zip((1, -1), widths, strict=True)
    )
    return keys, values


def told(cache: Any, keys: Any, values: Any) -> np.ndarray:
    """Return the token ids `[B, keys]` in what an update handed out; every element must tell the same."""
    if isinstance(keys, tuple | list):
        keys, values = (
            mx.dequantize(*a, group_size=cache.group_size, bits=cache.bits) for a in (keys, values)
        )
    shown = np.array(keys.astype(mx.float32)), np.array(values.astype(mx.float32))
    ids = np.rint(shown[0][:, 0, :, 0])
    for array, sign in zip(shown, (1, -1), strict=True):
        for head in range(HEADS):
            wanted = sign * (head + 1) * ids[:, :, None]
            assert np.abs(array[:, head] - wanted).max() < 1e-2
    return ids.astype(int)


def leaves(native: Any) -> Iterator[Any]:
    """Yield a native cache, or those inside a composite one."""
    if isinstance(native, CacheList):
        for part in native.caches:
            yield from leaves(part)
    else:
        yield native


def feed_native(kind: Kind, native: Any, ids: Ids) -> None:
    """Write tokens to a native cache."""
    for own, part in zip(kind.parts, leaves(native), strict=True):
        if isinstance(part, ChunkedKVCache):
            part.maybe_trim_front()  # as mlx-lm's llama4 does before each call
        part.update_and_fetch(*marks(ids, own.widths))


def filled_native(kind: Kind, ids: Ids, chunk: int) -> Any:
    """Return a native cache that has read the rows in chunks."""
    native = kind.native()
    for start in range(0, len(ids[0]), chunk):
        feed_native(kind, native, [row[start : start + chunk] for row in ids])
    return native


def feed(cache: FixedCapacityCache, kind: Kind, new: Ids, window: int | None = None) -> list[list[Ids]]:
    """Write tokens; return for each part, row and new token the ids that its attention sees, in rising order."""
    count, seen = len(new[0]), []
    for own, part in zip(kind.parts, cache.parts, strict=True):
        mask = part.make_mask(count, window_size=window)  # type: ignore[attr-defined]
        keys, values = part.update_and_fetch(*marks(new, own.widths))  # type: ignore[attr-defined]
        ids = told(part, keys, values)
        assert mask.dtype == mx.bool_
        assert mask.shape in [(1, 1, count, ids.shape[1]), (len(new), 1, count, ids.shape[1])]
        chosen = np.broadcast_to(np.array(mask), (len(new), 1, count, ids.shape[1]))[:, 0]
        seen.append([[sorted(ids[r][query].tolist()) for query in chosen[r]] for r in range(len(new))])
    return seen


def wanted(kind: Kind, ids: Ids, count: int, window: int | None = None) -> list[list[Ids]]:
    """Return what `feed` must return once the rows hold `ids`, of which the last `count` were fed."""
    return [
        [
            [sorted(row[p] for p in own.visible(at, window)) for at in range(len(row) - count, len(row))]
            for row in ids
        ]
        for own in kind.parts
    ]


def merged(kind: Kind, rows: Ids, chunk: int, capacity: int) -> FixedCapacityCache:
    """Return a ragged batch of rows that were read alone."""
    return kind.cls.merge([filled_native(kind, [row], chunk) for row in rows], capacity)


def adopted(kind: Kind, rows: Ids, chunk: int, capacity: int) -> FixedCapacityCache:
    """Return a batch of rows of equal length that were read together."""
    return kind.cls.adopt(filled_native(kind, rows, chunk), capacity)


def forms(cache: FixedCapacityCache) -> list[tuple[tuple[int, ...], mx.Dtype]]:
    """Return shape and dtype of each state array."""
    return [(tuple(array.shape), array.dtype) for array in cache.state]
