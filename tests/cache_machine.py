"""A slotted cache of any kind beside a list of token ids, under any order of calls."""

from __future__ import annotations

import dataclasses
import tempfile
from pathlib import Path

import mlx.core as mx
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, rule

from cache_oracle import Ids, Kind, adopted, feed, feed_native, forms, leaves, merged, wanted
from mlx_audit.caches import FixedCapacityCache
from mlx_audit.errors import CapacityExceeded, HostState
from tiny_models import raw


@dataclasses.dataclass
class Held:
    """A cache beside the rows that it must hold."""

    cache: FixedCapacityCache
    ids: Ids
    ragged: bool = False


class CacheMachine(RuleBasedStateMachine):
    """Writes, forgets, copies and converts caches in any order; a subclass says of which kinds."""

    kinds: st.SearchStrategy[Kind]
    caches = Bundle("caches")

    @initialize(
        target=caches,
        data=st.data(),
        lengths=st.lists(st.sampled_from([1, 2, 1, 4, 7, 12]), min_size=3, max_size=3),
        rows=st.integers(1, 3),
        ragged=st.booleans(),
        chunk=st.integers(1, 12),
        room=st.integers(0, 3) | st.integers(10, 60),
    )
    def start(
        self, data: st.DataObject, lengths: list[int], rows: int, ragged: bool, chunk: int, room: int
    ) -> Held:
        self.kind: Kind = data.draw(self.kinds)
        self.next_id, self.all = 1, []
        ragged = ragged and not any(getattr(n, "keep", 0) for n in leaves(self.kind.native()))
        lengths = lengths[: max(rows, 2)] if ragged else lengths[:1] * rows
        ids = [self.new_ids(count) for count in lengths]
        fill = merged if ragged else adopted
        return self.keep(Held(fill(self.kind, ids, chunk, max(lengths) + room), ids, ragged))

    def keep(self, held: Held) -> Held:
        self.all.append(held)
        return held

    def new_ids(self, count: int) -> list[int]:
        self.next_id += count
        return list(range(self.next_id - count, self.next_id))

    @rule(
        held=caches,
        count=st.integers(1, 4) | st.integers(5, 12),
        window=st.sampled_from([None, 1, 2, 5]),
        rung=st.integers(0, 12),
    )
    def update(self, held: Held, count: int, window: int | None, rung: int) -> None:
        """Write where there is room; each new token sees the ids that it may see, below any rung that holds them."""
        cache, time = held.cache, max(map(len, held.ids))
        count = min(count, cache.capacity - time) or count
        new = [self.new_ids(count) for _ in held.ids]
        if time + count > cache.capacity:
            before = [raw(array) for array in cache.state]
            with pytest.raises(CapacityExceeded):
                feed(cache.copy(), self.kind, new)
            assert [raw(array) for array in cache.state] == before
            return
        early = [part.offset for part in cache.parts]  # type: ignore[attr-defined]
        values = [offset.tolist() for offset in early]
        if rung:
            held.cache = cache = cache.at_rung(time + count + rung - 1)
        seen = feed(cache, self.kind, new, window)
        held.ids = [row + more for row, more in zip(held.ids, new, strict=True)]
        assert seen == wanted(self.kind, held.ids, count, window)
        held.cache = cache.at_rung(cache.capacity)
        assert [offset.tolist() for offset in early] == values

    @rule(held=caches, n=st.integers(-1, 14))
    def trim(self, held: Held, n: int) -> None:
        """Forget exactly `n` tokens, or none."""
        possible = self.kind.can_forget(n, [len(row) for row in held.ids], held.cache.capacity)
        before = [raw(array) for array in held.cache.state]
        assert held.cache.trim(n) == (n if possible else 0)
        if possible:
            held.ids = [row[: len(row) - n] for row in held.ids]
        else:
            assert [raw(array) for array in held.cache.state] == before

    @rule(target=caches, held=caches)
    def copy(self, held: Held) -> Held:
        return self.keep(dataclasses.replace(held, cache=held.cache.copy()))

    @rule(held=caches)
    def add_to_the_offset(self, held: Held) -> None:
        """What a caller does to an offset that it was given is its own affair."""
        for part in held.cache.parts:
            offset = part.offset  # type: ignore[attr-defined]
            offset += 7

    @rule(held=caches)
    def through_a_file(self, held: Held) -> None:
        """Save the state arrays and set them on a cache that has other content."""
        with tempfile.TemporaryDirectory() as folder:
            path = str(Path(folder) / "state.safetensors")
            mx.save_safetensors(path, {str(i): array for i, array in enumerate(held.cache.state)})
            loaded = mx.load(path)
            mx.eval(loaded)
        state = [loaded[str(index)] for index in range(len(held.cache.state))]
        blank = held.cache.with_state([mx.zeros_like(array) for array in state])
        other = (blank.padded() if held.ragged else blank).with_state(state)
        other.require_sound()
        held.cache = other

    @rule(held=caches, more=st.integers(0, 6), room=st.integers(0, 3) | st.integers(10, 40))
    def through_native(self, held: Held, more: int, room: int) -> None:
        """Hand over to mlx-lm's cache, go on there, and adopt it again at another capacity."""
        if held.ragged:
            with pytest.raises(HostState, match="rows of different length"):
                held.cache.to_native()
            return
        if not held.ids[0]:
            return
        native = held.cache.to_native()
        assert [part.offset for part in leaves(native)] == [len(held.ids[0])] * len(self.kind.parts)
        if more:
            new = [self.new_ids(more) for _ in held.ids]
            feed_native(self.kind, native, new)
            held.ids = [row + given for row, given in zip(held.ids, new, strict=True)]
        held.cache = self.kind.cls.adopt(native, len(held.ids[0]) + room)

    @invariant()
    def positions_are_those_of_the_rows(self) -> None:
        for held in getattr(self, "all", []):
            lengths = [len(row) for row in held.ids]
            assert held.cache.count() == max(lengths)
            assert held.cache.empty() == (not max(lengths))  # type: ignore[attr-defined]
            own = lengths if held.ragged else lengths[:1]
            for part in held.cache.parts:
                assert part.offset.tolist() == own  # type: ignore[attr-defined]
            assert len({form[0][0] for form in forms(held.cache) if len(form[0]) > 1}) == 1
            held.cache.require_sound()
