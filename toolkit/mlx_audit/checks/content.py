"""What the model's own caches hold, read without any help of ours: the reference for states and hand-overs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    ChunkedKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
)


def leaves(natives: Iterable[Any]) -> list[Any]:
    """Return the caches that entries consist of, in order: themselves, or those inside composite ones.

    A class of the model's own may say what it holds, as CacheList does.
    """
    found: list[Any] = []
    for native in natives:
        parts = getattr(native, "caches", None)
        found += [native] if parts is None else leaves(parts)
    return found


def own_state(native: Any) -> list[mx.array | None] | None:
    """Return all that a cache of the model's own class holds, as it says itself; None for a class of mlx-lm's."""
    return None if type(native).__module__ == KVCache.__module__ else list(native.state)


def content(native: Any) -> list[mx.array]:
    """Return what an mlx-lm cache holds: tokens in the order of time, without spare room; empty where unwritten.

    Of a ring these are the kept tokens and the latest, as many as a single token may see. A state that has no tokens
    is returned as it is.
    """
    if isinstance(native, CacheList):
        return [array for part in native.caches for array in content(part)]
    if isinstance(native, ArraysCache):
        states: Sequence[mx.array | None] = native.cache
        return [array for array in states if array is not None]
    if native.keys is None or native.values is None:
        return []
    if isinstance(native, QuantizedKVCache):
        keys: Sequence[mx.array] = native.keys
        return [array[..., : native.offset, :] for array in (*keys, *native.values)]
    return [_ordered(native, array) for array in (native.keys, native.values)]


def readable(native: Any) -> list[mx.array]:
    """Return `content` as numbers: quantized keys and values as what they stand for."""
    arrays = content(native)
    if not isinstance(native, QuantizedKVCache):
        return arrays
    return [
        mx.dequantize(packed, scales, biases, native.group_size, native.bits)
        for packed, scales, biases in zip(arrays[::3], arrays[1::3], arrays[2::3], strict=True)
    ]


def rounding(native: Any) -> list[mx.array | float]:
    """Return by how much each array of `readable` may be off where a number was rounded the other way."""
    if not isinstance(native, QuantizedKVCache):
        return [0.0] * len(content(native))
    return [mx.abs(mx.repeat(scales, native.group_size, axis=-1)) for scales in content(native)[1::3]]


def _ordered(native: Any, array: mx.array) -> mx.array:
    if isinstance(native, RotatingKVCache):
        return _ring(native, array)
    if isinstance(native, ChunkedKVCache):
        held = native.offset - native.start_position
        return array[..., max(0, held - native.chunk_size) : held, :]
    if isinstance(native, KVCache):
        return array[..., : native.offset, :]
    raise TypeError(f"what a {type(native).__qualname__} holds is not known")


def _ring(native: RotatingKVCache, array: mx.array) -> mx.array:
    """Return the tokens of a ring that may be turned, partly filled, or longer than its size after a long chunk."""
    size, keep, at = native.max_size, native.keep, native._idx
    if native.offset <= array.shape[2]:
        array = array[..., : native.offset, :]
    else:
        array = mx.concatenate([array[..., :keep, :], array[..., at:, :], array[..., keep:at, :]], axis=2)
    surplus = array.shape[2] - size
    if surplus <= 0:
        return array
    return mx.concatenate([array[..., :keep, :], array[..., keep + surplus :, :]], axis=2)
