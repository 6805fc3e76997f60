"""What may be lost on the way into a file, or from and to native caches."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import KVCache

from mlx_audit.caches import FixedCapacityKVCache as Cache
from mlx_audit.caches.slots import SlottedCache
from mlx_audit.decode import CompiledDecodeSession as Session
from mlx_audit.decode import State
from mlx_audit.decode import session as sessions
from mlx_audit.faults.base import Patch, fault


def _without_positions(state: State) -> State:
    """Return a state whose positions are zero."""
    return [[array * 0 if array.dtype == mx.int32 else array for array in arrays] for arrays in state]


def _halved(array: mx.array) -> mx.array:
    """Return an array with the digits that bfloat16 keeps; of packed numbers, every second bit."""
    if mx.issubdtype(array.dtype, mx.floating):
        return array.astype(mx.bfloat16).astype(array.dtype)
    return array & 0x55555555


@fault("STA004", needs="slots")
def saved_without_position(patch: Patch) -> None:
    """The file holds zeros where the positions should be."""
    own = sessions.save_state
    patch.setattr(
        sessions,
        "save_state",
        lambda path, step, state, position: own(path, step, _without_positions(state), position),
    )


@fault("STA004", needs="slots")
def saved_from_the_start(patch: Patch) -> None:
    """Positions are lost in the caches and in the header alike."""
    own = sessions.save_state
    patch.setattr(
        sessions,
        "save_state",
        lambda path, step, state, position: own(path, step, _without_positions(state), 0),
    )


@fault("STA004")
def saved_in_half_precision(patch: Patch) -> None:
    """Keys, or the first array of a state, go through bfloat16 on their way into the file."""
    own = sessions.save_state

    def save(path: Any, step: Any, state: Any, position: int) -> None:
        own(path, step, [[_halved(arrays[0]), *arrays[1:]] if arrays else [] for arrays in state], position)

    patch.setattr(sessions, "save_state", save)


@fault("STA005", needs="linear")
def handed_over_one_short(patch: Patch) -> None:
    """The native cache lacks the last token."""
    own = Cache.to_native

    def to_native(self: Cache) -> KVCache:
        native = own(self)
        native.offset -= 1
        return native

    patch.setattr(Cache, "to_native", to_native)


@fault("STA005", needs="linear")
def handed_over_one_late(patch: Patch) -> None:
    """The native cache counts one token too many, so that the next is rotated wrongly and leaves a hole."""
    own = Cache.to_native

    def to_native(self: Cache) -> KVCache:
        native = own(self)
        native.keys = mx.pad(native.keys, [(0, 0), (0, 0), (0, 1), (0, 0)])
        native.values = mx.pad(native.values, [(0, 0), (0, 0), (0, 1), (0, 0)])
        native.offset += 1
        return native

    patch.setattr(Cache, "to_native", to_native)


@fault("STA005", needs="slots")
def adopted_one_short(patch: Patch) -> None:
    """The position of a cache that was taken over is one too small."""
    own = SlottedCache.adopt.__func__  # type: ignore[attr-defined]

    def adopt(cls: type[SlottedCache], native: Any, max_tokens: int) -> SlottedCache:
        cache: SlottedCache = own(cls, native, max_tokens)
        cache._position = cache._position - 1
        return cache

    patch.setattr(SlottedCache, "adopt", classmethod(adopt))


@fault("STA005", needs="linear")
def native_cache_emptied(patch: Patch) -> None:
    """Taking a native cache over empties it."""
    own = Cache.adopt.__func__  # type: ignore[attr-defined]

    def adopt(cls: type[Cache], native: Any, max_tokens: int) -> Cache:
        cache = own(cls, native, max_tokens)
        native.keys = native.keys * 0
        return cache

    patch.setattr(Cache, "adopt", classmethod(adopt))


@fault("STA005", needs="linear")
def buffers_shared_with_native(patch: Patch) -> None:
    """A native cache works in the session's own arrays."""

    def to_native(self: Cache) -> KVCache:
        native = KVCache()
        native.keys, native.values, native.offset = self.keys, self.values, int(self._position.item())
        return native

    patch.setattr(Cache, "to_native", to_native)
    patch.setattr(Session, "state", property(lambda self: self._state))
