"""What a batch may mix up: rows, their positions, and their padding; and where a ring may turn wrongly."""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from mlx_audit.caches import FixedCapacityKVCache as Cache
from mlx_audit.caches.ring import RingCache
from mlx_audit.caches.slots import NEVER, SlottedCache
from mlx_audit.decode import CompiledDecodeSession as Session
from mlx_audit.decode import session as sessions
from mlx_audit.decode.ladder import rung_for
from mlx_audit.faults.base import Patch, fault


@fault("PAR005", needs="linear")
def rows_mixed(patch: Patch) -> None:
    """A little of each row's values comes from its neighbour."""
    own = Cache.keys_and_values

    def keys_and_values(self: Cache) -> tuple[mx.array, mx.array]:
        keys, values = own(self)
        return keys, values + 0.01 * mx.roll(values, 1, axis=0) * (values.shape[0] > 1)

    patch.setattr(Cache, "keys_and_values", keys_and_values)


@fault("MSK005", needs="slots ragged")
def left_padding_seen(patch: Patch) -> None:
    """The slots in front of a row's first token are not hidden."""

    def make_mask(self: SlottedCache, N: int, *, window_size: int | None = None, **_: Any) -> mx.array:
        queries = mx.expand_dims(self._now() + mx.arange(N), 1)
        return mx.expand_dims(self._visible(queries, self._key_times(N), window_size), (0, 1))

    patch.setattr(SlottedCache, "make_mask", make_mask)


@fault("MSK004", needs="ragged")
def ragged_rows_in_reverse(patch: Patch) -> None:
    """The rows' caches are merged in the wrong order."""
    own = Session._read_rows

    def read_rows(self: Session, ids: mx.array, counts: list[int]) -> Any:
        logits, _ = own(self, ids, counts)
        return logits, own(self, ids[::-1], counts[::-1])[1]

    patch.setattr(Session, "_read_rows", read_rows)


@fault("MSK004", needs="slots ragged rope")
def position_of_the_longest_row_for_all(patch: Patch) -> None:
    """All rows are rotated as the longest is."""
    own = SlottedCache.offset.fget  # type: ignore[attr-defined]

    def offset(self: SlottedCache) -> mx.array:
        if self._time is None:
            return own(self)  # type: ignore[no-any-return]
        return mx.broadcast_to(self._time, self._position.shape)

    patch.setattr(SlottedCache, "offset", property(offset))


@fault("MSK005", needs="ragged")
def ids_beyond_the_lengths_are_read(patch: Patch) -> None:
    """Every row is read to the length of the longest, and its position is set back."""
    own = Session._read_rows

    def read_rows(self: Session, ids: mx.array, counts: list[int]) -> Any:
        _, caches = own(self, ids, [max(counts)] * len(counts))
        return own(self, ids, counts)[0], caches

    patch.setattr(Session, "_read_rows", read_rows)


@fault("PAR001", needs="linear")
def cache_read_in_float32(patch: Patch) -> None:
    """What the cache hands out is float32 whatever the model's dtype is."""
    own = Cache.keys_and_values

    def keys_and_values(self: Cache) -> tuple[mx.array, mx.array]:
        keys, values = own(self)
        return keys.astype(mx.float32), values.astype(mx.float32)

    patch.setattr(Cache, "keys_and_values", keys_and_values)


@fault("PAR001", needs="rotating")
def ring_forgets_one_at_its_first_turn(patch: Patch) -> None:
    """When the ring turns for the first time, the token in its second slot is hidden for one step."""
    own = RingCache._key_times

    def key_times(self: RingCache, N: int) -> mx.array:
        times = own(self, N)
        hidden = (self._now() == self.slots) & (mx.arange(times.shape[0]) == 1)
        return mx.where(hidden, NEVER, times)

    patch.setattr(RingCache, "_key_times", key_times)


@fault("PAR001", needs="ring")
def traced_again_at_the_turn(patch: Patch) -> None:
    """The step is traced anew where a ring of 8 turns."""
    own = Session._compiled

    def compiled(self: Session, count: int) -> Any:
        function = own(self, count)
        function._count.traces += self._position == 8
        return function

    patch.setattr(Session, "_compiled", compiled)


@fault("PAR007", needs="only_rings")
def rungs_go_on_beyond_the_ring(patch: Patch) -> None:
    """A stack of rings is traced for each rung of the text, although it attends over no more slots."""
    patch.setattr(Session, "_rung", lambda self, count: rung_for(self._position + count, self.capacity))


@fault("PAR006")
def generate_draws_twice(patch: Patch) -> None:
    """One random number too many is drawn for each token."""
    own = sessions._chosen

    def chosen(logits: mx.array, sampler: Any) -> mx.array:
        if sampler is not None:
            sampler(logits)
        return own(logits, sampler)

    patch.setattr(sessions, "_chosen", chosen)


@fault("PAR006")
def sampler_gets_half_the_logits(patch: Patch) -> None:
    """The sampler is handed something flatter than log-probabilities."""
    own = sessions._chosen
    patch.setattr(
        sessions, "_chosen", lambda logits, sampler: own(logits if sampler is None else logits / 2, sampler)
    )
