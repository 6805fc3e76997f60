"""Entries that each stand for a whole group of tokens: a slot is written anew with each token of its group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import mlx.core as mx
from mlx_lm.models.cache import KVCache

from mlx_audit.caches.keyed import KeyedCache, pair
from mlx_audit.caches.refusals import require_fitting, require_native, require_slots
from mlx_audit.errors import ShapeMismatch


class PooledKVCache(KVCache):
    """The entries of closed groups as an mlx-lm cache; `offset` counts tokens, those of the open group too."""

    def __init__(self, ratio: int, block: int = 1) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ratio, self.block = ratio, block

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Append the entries that tokens close, where each token brings what its group is up to it."""
        length = keys.shape[2]
        last = slice(self.ratio - 1 - self.offset % self.ratio, None, self.ratio)
        entries = [array[..., last, :] for array in (keys, values)]
        if self.keys is not None:
            held = zip((self.keys, self.values), entries, strict=True)
            entries = [mx.concatenate(list(arrays), axis=2) for arrays in held]
        self.keys, self.values = entries
        self.offset += length
        return self.keys, self.values


class FixedCapacityPooledCache(KeyedCache):
    """One entry for every `ratio` tokens, at slot position // ratio.

    The entry of the open group may hold anything: no token sees it before the last of its group has written it.

    Args:
        keys, values: `[B, heads, slots, width]`, as many slots as `slots_for(capacity)` says.
        position: int32 `[1]`, tokens already written.
        capacity: Tokens of the text.
        ratio: Tokens in a group.
        block: Slots that a model looks at together: there are, and attention reads, only whole blocks.
    """

    kind = "pooled"
    native = PooledKVCache

    def __init__(
        self,
        keys: mx.array | None,
        values: mx.array | None,
        position: mx.array,
        capacity: int,
        ratio: int,
        block: int = 1,
    ) -> None:
        super().__init__([] if keys is None or values is None else [keys, values], position, capacity)
        require_slots(type(self), self.slots, _slots(capacity, ratio, block))
        self.ratio, self.block = ratio, block

    @property
    def group(self) -> mx.array:
        """Index of the group of the next token, int32 `[1]`; see `offset` for its stride."""
        return mx.as_strided(self._slot_of(self._position), (1,), (0,))

    def slots_for(self, tokens: int) -> int:
        """Return how many slots so many tokens begin, in whole blocks."""
        return _slots(tokens, self.ratio, self.block)

    def at_rung(self, rung: int) -> Self:
        return super().at_rung(self.slots_for(rung))

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """Return the entries of the groups up to the rung."""
        return self._up_to_rung()

    def update(self, keys: mx.array, values: mx.array, length: int) -> None:
        """Write the entries `[B, heads, groups, width]` of the next groups, from the open one on, and advance.

        Args:
            keys, values: At least those of the groups that the tokens close, at most of those that they touch.
            length: Tokens.
        """
        require_fitting(type(self), [keys, values], self._buffers())
        self._reserve(length)
        slot = self.slot
        written = zip(self._buffers(), (keys, values), strict=True)
        self._set_buffers([mx.slice_update(old, new, slot, axes=(2,)) for old, new in written])
        self._advance(length)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Write `[B, heads, L, width]`, where each token brings what its group is up to it, and return all entries."""
        length = keys.shape[2]
        groups = mx.arange(-(-length // self.ratio)) + self.group
        last = mx.minimum((groups + 1) * self.ratio - 1 - self._now(), length - 1)
        self.update(mx.take(keys, last, axis=2), mx.take(values, last, axis=2), length)
        return self.keys_and_values()

    def refilled(self, native: Any) -> Self:
        held = require_native(type(self), native, self.capacity)
        entries = self._content(native) or [buffer[:, :, :0] for buffer in self._buffers()]
        buffers = [self._placed(array, held, held) for array in entries]
        return self.with_state([*buffers, mx.array([held], mx.int32)], held=held)

    def to_native(self) -> PooledKVCache:
        native, held = PooledKVCache(self.ratio, self.block), self.count() or 0
        native.keys, native.values = (array[..., : held // self.ratio, :] for array in self._buffers())
        native.offset = held
        return native

    def _slot_of(self, time: mx.array) -> mx.array:
        return time // self.ratio

    def _key_times(self, N: int) -> mx.array:
        # A group is seen from its last token on.
        return (mx.arange(self._rung) + 1) * self.ratio - 1

    def _require_mergeable(self) -> None:
        raise ShapeMismatch(
            "rows of different length close their groups at different tokens",
            where="FixedCapacityPooledCache.merge",
            fix="decode rows of equal length together",
        )

    def _placed(self, content: mx.array, held: int, time: int) -> mx.array:
        rest = self.slots - content.shape[2]
        return mx.pad(content, [(0, 0), (0, 0), (0, rest), (0, 0)])

    @classmethod
    def _slots_for(cls, native: Any, max_tokens: int) -> int:
        return _slots(max_tokens, native.ratio, native.block) if cls._native_buffers(native) else 0

    @classmethod
    def _like(cls, native: Any, buffers: Sequence[mx.array], position: mx.array, capacity: int) -> Self:
        return cls(*pair(buffers), position, capacity, native.ratio, native.block)

    @classmethod
    def _content(cls, native: Any) -> list[mx.array]:
        return [array[..., : native.offset // native.ratio, :] for array in cls._native_buffers(native)]


def _slots(tokens: int, ratio: int, block: int) -> int:
    groups = -(-tokens // ratio)
    return -(-groups // block) * block
