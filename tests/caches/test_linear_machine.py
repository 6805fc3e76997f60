"""FixedCapacityKVCache against a list of token ids: whatever is done to it, every slot and mask shows these ids."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule
from mlx_lm.models.cache import KVCache

from mlx_audit.caches import FixedCapacityKVCache
from mlx_audit.errors import CapacityExceeded
from tiny_models import raw

BATCH, HEADS, KEY_WIDTH, VALUE_WIDTH = 2, 2, 3, 5
# Powers of two, so that each id stays exact in bfloat16 for every row and head.
SIGNS = np.array([1, -1])[:, None, None, None] * np.array([1, 2])[None, :, None, None]


@dataclass
class Held:
    """A cache beside the ids that it must hold."""

    cache: FixedCapacityKVCache
    ids: list[int] = field(default_factory=list)


class LinearCacheMachine(RuleBasedStateMachine):
    """Writes, forgets, copies and converts caches in any order."""

    caches = Bundle("caches")

    @initialize(target=caches, count=st.integers(1, 6), room=st.integers(0, 6), half=st.booleans())
    def adopt(self, count: int, room: int, half: bool) -> Held:
        self.dtype = mx.bfloat16 if half else mx.float32
        self.next_id = 0
        self.all: list[Held] = []
        native = KVCache()
        ids = self.new_ids(count)
        native.update_and_fetch(*self.rows(ids))
        return self.keep(Held(FixedCapacityKVCache.adopt(native, count + room), ids))

    def keep(self, held: Held) -> Held:
        self.all.append(held)
        return held

    def new_ids(self, count: int) -> list[int]:
        first = self.next_id
        self.next_id += count
        return [1 + (first + index) % 120 for index in range(count)]

    def rows(self, ids: list[int]) -> tuple[mx.array, mx.array]:
        mark = np.array(ids)[None, None, :, None] * SIGNS
        keys = np.broadcast_to(mark, (*mark.shape[:3], KEY_WIDTH))
        values = np.broadcast_to(-mark, (*mark.shape[:3], VALUE_WIDTH))
        return mx.array(keys).astype(self.dtype), mx.array(values).astype(self.dtype)

    @rule(held=caches, count=st.integers(1, 4), window=st.sampled_from([None, 1, 2, 5]))
    def update(self, held: Held, count: int, window: int | None) -> None:
        """Write where there is room; the mask made before shows each new token the ids that it may see."""
        cache = held.cache
        if len(held.ids) + count > cache.capacity:
            before = [raw(array) for array in cache.state]
            with pytest.raises(CapacityExceeded):
                cache.update_and_fetch(*self.rows([99] * count))
            assert [raw(array) for array in cache.state] == before
            return
        mask = np.array(cache.make_mask(count, window_size=window))
        assert mask.shape == (1, 1, count, cache.capacity)
        start, new = len(held.ids), self.new_ids(count)
        keys, _ = cache.update_and_fetch(*self.rows(new))
        held.ids = held.ids + new
        shown = np.array(keys[0, 0, :, 0].astype(mx.float32))
        for row in range(count):
            visible = held.ids[: start + row + 1]
            wanted = visible if window is None else visible[-window:]
            assert shown[mask[0, 0, row]].tolist() == wanted

    @rule(held=caches, n=st.integers(-1, 8))
    def trim(self, held: Held, n: int) -> None:
        """Forget exactly `n` tokens, or none."""
        possible = 0 <= n <= len(held.ids)
        assert held.cache.trim(n) == (n if possible else 0)
        if possible:
            held.ids = held.ids[: len(held.ids) - n]

    @rule(target=caches, held=caches)
    def copy(self, held: Held) -> Held:
        return self.keep(Held(held.cache.copy(), held.ids))

    @rule(held=caches)
    def add_to_the_offset(self, held: Held) -> None:
        """What a caller does to an offset that it was given is its own affair."""
        offset = held.cache.offset
        offset += 7

    @rule(held=caches)
    def through_a_file(self, held: Held) -> None:
        """Save the state arrays and set them on a cache that held something else."""
        with tempfile.TemporaryDirectory() as folder:
            path = str(Path(folder) / "state.safetensors")
            mx.save_safetensors(path, {str(i): array for i, array in enumerate(held.cache.state)})
            loaded = mx.load(path)
            mx.eval(loaded)
        other = held.cache.copy()
        other.trim(len(held.ids))
        other.update_and_fetch(*self.rows([99]))
        other.state = [loaded[str(index)] for index in range(3)]
        held.cache = other

    @rule(target=caches, held=consumes(caches), room=st.integers(0, 4))
    def through_native(self, held: Held, room: int) -> Held:
        """Hand over to mlx-lm's cache and adopt it again, at another capacity."""
        native = held.cache.to_native()
        assert native.offset == len(held.ids)
        if not held.ids:
            assert native.keys is None
            return held
        held.cache = FixedCapacityKVCache.adopt(native, len(held.ids) + room)
        return held

    @invariant()
    def every_slot_shows_the_oracles_ids(self) -> None:
        for held in getattr(self, "all", []):
            cache, count = held.cache, len(held.ids)
            assert cache.offset.tolist() == cache.slot.tolist() == [count]
            assert (cache.size(), cache.empty()) == (count, not count)
            keys, values = self.rows(held.ids) if count else (None, None)
            if count:
                assert raw(cache.keys[:, :, :count]) == raw(keys)
                assert raw(cache.values[:, :, :count]) == raw(values)
            assert all(bool(mx.isfinite(array).all()) for array in cache.state)
            assert [(array.shape, array.dtype) for array in cache.state] == [
                ((BATCH, HEADS, cache.capacity, KEY_WIDTH), self.dtype),
                ((BATCH, HEADS, cache.capacity, VALUE_WIDTH), self.dtype),
                ((1,), mx.int32),
            ]


TestLinearCache = LinearCacheMachine.TestCase
TestLinearCache.settings = settings(max_examples=30, stateful_step_count=25)
