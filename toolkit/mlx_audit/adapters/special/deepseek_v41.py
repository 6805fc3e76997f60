"""The fixed-capacity form of deepseek_v41's own `LayerCache`: a window, closed groups, and the rows of the open one.

Each step writes the open group's entry anew, at slot position // ratio; nobody sees it before the group is closed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Self

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import ArraysCache, RotatingKVCache

from mlx_audit.adapters.module_state import ModuleState
from mlx_audit.adapters.special.pooled import FixedCapacityPooledCache, PooledKVCache
from mlx_audit.caches import FixedCapacityCache, FixedCapacityCacheList
from mlx_audit.caches.arrays import FixedCapacityArraysCache
from mlx_audit.caches.rotating import FixedCapacityRotatingCache
from mlx_audit.errors import NotCompileCapable, ShapeMismatch

_PROBE = 8
"""Tokens from which forms are read off, or as many as the largest group has."""


class DeepseekV41Adapter:
    """Makes the fixed-capacity caches of a deepseek_v41 model.

    Args:
        model: As the patch of its source leaves it; its parameters may be lazy, nothing is evaluated.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def new_fixed_capacity_cache(self, max_tokens: int, *, batch_size: int = 1) -> list[FixedCapacityCache]:
        """Return one empty cache for each `LayerCache`; see `FixedCapacityKVCacheProviding`."""
        stages = self.model.model.pipeline_size
        if stages > 1:
            raise NotCompileCapable(
                "a pipeline of several stages sends what its caches hold", found=f"{stages} stages", allowed=1
            )
        native = self.model.make_cache()
        tokens = max([_PROBE, *(cache.ratio for cache in native)])
        before = ModuleState(self.model)
        try:
            self.model(mx.zeros((batch_size, tokens), mx.int32), cache=native)
        finally:
            before.restore()
        block = self.model.args.candidate_block_size
        return [FixedCapacityLayerCache.like(cache, max_tokens, block=block) for cache in native]


class FixedCapacityLayerCache(FixedCapacityCacheList):
    """What one layer keeps, behind the methods that the model calls on its own `LayerCache`.

    Args:
        caches: The window; then, in a layer that compresses, its entries; then the rows of the open group, if groups
            have more than one token.
        capacity: Tokens of the text.
        new_native: Makes an empty `LayerCache` of the same parameters.
    """

    kind = "deepseek_v41"

    def __init__(
        self, caches: Sequence[FixedCapacityCache], capacity: int, new_native: Callable[[], Any]
    ) -> None:
        super().__init__(caches, capacity)
        self._new_native = new_native
        # Tokens of the call under way: entries are written after the window.
        self._length = 0
        if len(caches) > 1:
            # In tokens, as rungs are: an entry may stand for several.
            self.slots = capacity

    # What the model calls.

    @property
    def offset(self) -> mx.array:
        """Position of the next token, int32 `[1]`."""
        return self._window.offset

    @property
    def compress_kv(self) -> mx.array:
        """The entries `[B, groups, width]`, those that hold nothing yet among them."""
        return self._entries.keys_and_values()[0][:, 0]

    @property
    def index_k(self) -> mx.array:
        """The index keys of the entries, `[B, groups, width]`."""
        return self._entries.keys_and_values()[1][:, 0]

    def window_indices(self, length: int) -> mx.array:
        """Return which rows of the window the next queries attend to, in the order of time, -1 for none."""
        ring, chunk = self._window.extent, mx.arange(length)
        now = self._window.offset
        queries = mx.expand_dims(now + chunk, 1)
        times = mx.maximum(queries - self._window.window + 1, 0) + mx.arange(
            min(self._window.window, ring + (length if length > 1 else 0))
        )
        rows = times % self._window.slots
        if length > 1:
            # The chunk follows the ring as it was before.
            rows = mx.where(times < now, rows, ring + times - now)
        return mx.where(times <= queries, rows, -1)

    def update_window(self, kv: mx.array) -> mx.array:
        """Write the rows `[B, L, width]` and return what attention reads."""
        self._length = kv.shape[1]
        rows = kv[:, None]
        return self._window.update_and_fetch(rows, rows[..., :0])[0][:, 0]

    def update_pending(
        self, kv: mx.array, gate: mx.array, ratio: int, start_pos: mx.array
    ) -> tuple[mx.array, mx.array, mx.array]:
        """Return the rows of the open group, and of those that follow it, and its index.

        `[B, groups, ratio, width]` each, for all groups that the rows `[B, L, width]` close, or for the open one. What
        is not there yet is any finite number.
        """
        length, entries, pending = kv.shape[1], self._entries, self._pending
        taken = entries.offset % ratio
        groups = -(-length // ratio)
        order = mx.minimum(ratio - taken + mx.arange(groups * ratio), ratio + length - 1)
        left = mx.arange(ratio) >= ratio - (taken + length) % ratio
        found = []
        for index, new in enumerate((kv, gate)):
            rows = mx.concatenate([pending.state[index], new], axis=1)
            pending[index] = mx.where(left[:, None], rows[:, length:], 0)
            found.append(mx.unflatten(mx.take(rows, order, axis=1), 1, (groups, ratio)))
        return found[0], found[1], entries.group

    def update_compressed(self, kv: mx.array, k: mx.array | None) -> None:
        """Write the entries `[B, groups, width]` and their index keys."""
        keys = kv[:, None]
        self._entries.update(keys, keys[..., :0] if k is None else k[:, None], self._length)

    # From and to the model's own caches.

    @classmethod
    def like(cls, native: Any, max_tokens: int, *, block: int = 1) -> Self:
        """Return an empty cache with the form of a `LayerCache` that has closed a group, if it ever does.

        Args:
            native: Written by a forward.
            max_tokens: Tokens of the text.
            block: Entries that the model judges together.
        """
        window, *rest = native.caches
        caches: list[FixedCapacityCache] = [FixedCapacityRotatingCache.like(window, max_tokens)]
        if rest:
            rest[0].block = block
            caches.append(FixedCapacityPooledCache.like(rest[0], max_tokens))
        if len(rest) > 1:
            rows = [mx.zeros((a.shape[0], native.ratio, a.shape[2]), a.dtype) for a in rest[1].cache]
            caches.append(FixedCapacityArraysCache(rows, max_tokens))
        layer, window_size, ratio = type(native), native.window_size, native.ratio
        return cls(caches, max_tokens, lambda: layer(window_size, ratio))

    @classmethod
    def adopt(cls, native: Any, max_tokens: int) -> Self:
        return cls.like(native, max_tokens).refilled(native)

    @classmethod
    def merge(cls, _: Sequence[Any], max_tokens: int) -> Self:  # noqa: ARG003
        raise _not_ragged()

    def merged(self, _: Sequence[Any]) -> Self:
        raise _not_ragged()

    def padded(self) -> Self:
        raise _not_ragged()

    def to_native(self) -> Any:
        native = self._new_native()
        held = native.offset = self.count() or 0
        if not held:
            return native
        window = self._window.to_native()
        native.window = window._temporal_order(window.keys)[:, 0]
        if native.ratio and (closed := held // native.ratio):
            keys, values = (rows[:, 0, :closed] for rows in self._entries.keys_and_values())
            native.compress_kv, native.index_k = keys, values if values.size else None
        if native.ratio > 1:
            left = native.ratio - held % native.ratio
            native.pending_kv, native.pending_gate = (rows[:, left:] for rows in self._pending.state)
        return native

    @property
    def _window(self) -> FixedCapacityRotatingCache:
        return self.caches[0]  # type: ignore[return-value]

    @property
    def _entries(self) -> FixedCapacityPooledCache:
        return self.caches[1]  # type: ignore[return-value]

    @property
    def _pending(self) -> FixedCapacityArraysCache:
        return self.caches[2]  # type: ignore[return-value]


def parts_of(layer: Any) -> tuple[Any, ...]:
    """Return what a `LayerCache` holds as mlx-lm's own caches, in the order of the fixed-capacity form's parts."""
    parts: list[Any] = [RotatingKVCache(layer.window_size)]
    if layer.window is not None:
        parts[0].keys, parts[0].values = _pair(layer.window, None)
        parts[0].offset, parts[0]._idx = layer.offset, layer.window.shape[1]
    if layer.ratio:
        entries = PooledKVCache(layer.ratio)
        if layer.compress_kv is not None:
            entries.keys, entries.values = _pair(layer.compress_kv, layer.index_k)
        entries.offset = layer.offset
        parts.append(entries)
    if layer.ratio > 1:
        pending = ArraysCache(2)
        pending.cache = [layer.pending_kv, layer.pending_gate]
        parts.append(pending)
    return tuple(parts)


def _pair(keys: mx.array, values: mx.array | None) -> tuple[mx.array, mx.array]:
    """Return rows `[B, L, width]` as keys and values of one head."""
    return keys[:, None], (keys[..., :0] if values is None else values)[:, None]


def _not_ragged() -> ShapeMismatch:
    return ShapeMismatch(
        "rows of different length cannot be decoded side by side: LayerCache has no merge",
        where="FixedCapacityLayerCache.merge",
        fix="decode rows of equal length together",
    )
