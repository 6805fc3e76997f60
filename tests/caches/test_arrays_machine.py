"""FixedCapacityArraysCache against a list of token ids: the last three of each row, and a sum that forgets slowly."""

from __future__ import annotations

import dataclasses

import mlx.core as mx
import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, rule
from mlx_lm.models.cache import ArraysCache

from cache_oracle import Ids
from mlx_audit.caches.arrays import FixedCapacityArraysCache

LAST = 3


@dataclasses.dataclass
class Held:
    """A cache beside the rows that it must tell of."""

    cache: FixedCapacityArraysCache
    ids: Ids


def read(cache: ArraysCache | FixedCapacityArraysCache, ids: Ids) -> None:
    """Do what a recurrent layer does with new tokens; the last ids may be fewer than three at first."""
    new = mx.array(ids)
    last = new if cache[0] is None else mx.concatenate([cache[0], new], axis=1)
    total = mx.zeros((len(ids), 1)) if cache[2] is None else cache[2]
    for index in range(new.shape[1]):
        total = 0.5 * total + new[:, index : index + 1]
    cache[0], cache[2] = last[:, -LAST:], total


class ArraysMachine(RuleBasedStateMachine):
    """Writes, copies and converts caches in any order; the middle array is never written."""

    caches = Bundle("caches")

    @initialize(
        target=caches, lengths=st.lists(st.integers(1, 6), min_size=1, max_size=3), ragged=st.booleans()
    )
    def start(self, lengths: list[int], ragged: bool) -> Held:
        self.next_id, self.all = 1, []
        lengths = lengths if ragged else lengths[:1] * len(lengths)
        rows = [self.new_ids(count) for count in lengths]
        probe = ArraysCache(3)
        read(probe, [[0] * 8])
        form = FixedCapacityArraysCache.like(probe, 99)
        natives = [ArraysCache(3) for _ in (rows if ragged else [0])]
        for native, ids in zip(natives, [[row] for row in rows] if ragged else [rows], strict=True):
            read(native, ids)
        return self.keep(Held(form.merged(natives) if ragged else form.refilled(natives[0]), rows))

    def keep(self, held: Held) -> Held:
        self.all.append(held)
        return held

    def new_ids(self, count: int) -> list[int]:
        self.next_id += count
        return list(range(self.next_id - count, self.next_id))

    @rule(held=caches, count=st.integers(1, 5))
    def update(self, held: Held, count: int) -> None:
        new = [self.new_ids(count) for _ in held.ids]
        early, before = held.cache.state, [array.tolist() for array in held.cache.state]
        read(held.cache, new)
        held.ids = [row + more for row, more in zip(held.ids, new, strict=True)]
        assert [array.tolist() for array in early] == before

    @rule(held=caches, n=st.integers(-1, 5))
    def trim(self, held: Held, n: int) -> None:
        assert held.cache.trim(n) == 0

    @rule(target=caches, held=caches)
    def copy(self, held: Held) -> Held:
        return self.keep(dataclasses.replace(held, cache=held.cache.copy()))

    @rule(held=caches)
    def through_native(self, held: Held) -> None:
        native = held.cache.to_native()
        new = [self.new_ids(1) for _ in held.ids]
        read(native, new)
        held.ids = [row + more for row, more in zip(held.ids, new, strict=True)]
        held.cache = held.cache.refilled(native)

    @rule(held=caches, rung=st.integers(1, 9))
    def through_a_state(self, held: Held, rung: int) -> None:
        held.cache = held.cache.with_state(held.cache.state).at_rung(rung)

    @invariant()
    def arrays_tell_the_rows(self) -> None:
        for held in getattr(self, "all", []):
            last, total = held.cache.state
            assert last.tolist() == [([0] * LAST + row)[-LAST:] for row in held.ids]
            sums = [sum(0.5 ** (len(row) - 1 - i) * id_ for i, id_ in enumerate(row)) for row in held.ids]
            assert np.allclose(np.array(total)[:, 0], sums)
            assert (last.dtype, total.dtype, held.cache.rows) == (mx.int32, mx.float32, len(held.ids))


TestArraysCache = ArraysMachine.TestCase
TestArraysCache.settings = settings(max_examples=30, stateful_step_count=15)
