"""What may be lost on the way into a file, or from and to native caches."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import KVCache

from mlx_audit.caches import FixedCapacityKVCache as Cache
from mlx_audit.decode import CompiledDecodeSession as Session
from mlx_audit.decode import session as sessions
from planted.registry import Patch, fault


@fault
def saved_without_position(patch: Patch) -> None:
    """The file holds zeros where the positions should be."""
    own = sessions.save_state
    patch.setattr(
        sessions,
        "save_state",
        lambda path, step, state, position: own(path, step, [[k, v, p * 0] for k, v, p in state], position),
    )


@fault
def saved_from_the_start(patch: Patch) -> None:
    """Positions are lost in the caches and in the header alike."""
    own = sessions.save_state
    patch.setattr(
        sessions,
        "save_state",
        lambda path, step, state, position: own(path, step, [[k, v, p * 0] for k, v, p in state], 0),
    )


@fault
def saved_in_half_precision(patch: Patch) -> None:
    """Keys go through bfloat16 on their way into the file."""
    own = sessions.save_state

    def save(path: Any, step: Any, state: Any, position: int) -> None:
        own(path, step, [[k.astype(mx.bfloat16).astype(k.dtype), v, p] for k, v, p in state], position)

    patch.setattr(sessions, "save_state", save)


@fault
def handed_over_one_short(patch: Patch) -> None:
    """The native cache lacks the last token."""
    own = Cache.to_native

    def to_native(self: Cache) -> KVCache:
        native = own(self)
        native.offset -= 1
        return native

    patch.setattr(Cache, "to_native", to_native)


@fault
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


@fault
def adopted_one_short(patch: Patch) -> None:
    """The position of a cache that was taken over is one too small."""
    own = Cache.adopt.__func__  # type: ignore[attr-defined]

    def adopt(cls: type[Cache], native: Any, max_tokens: int) -> Cache:
        cache = own(cls, native, max_tokens)
        cache._position = cache._position - 1
        return cache

    patch.setattr(Cache, "adopt", classmethod(adopt))


@fault
def native_cache_emptied(patch: Patch) -> None:
    """Taking a native cache over empties it."""
    own = Cache.adopt.__func__  # type: ignore[attr-defined]

    def adopt(cls: type[Cache], native: Any, max_tokens: int) -> Cache:
        cache = own(cls, native, max_tokens)
        native.keys = native.keys * 0
        return cache

    patch.setattr(Cache, "adopt", classmethod(adopt))


@fault
def buffers_shared_with_native(patch: Patch) -> None:
    """A native cache works in the session's own arrays."""

    def to_native(self: Cache) -> KVCache:
        native = KVCache()
        native.keys, native.values, native.offset = self.keys, self.values, int(self._position.item())
        return native

    patch.setattr(Cache, "to_native", to_native)
    patch.setattr(Session, "state", property(lambda self: self._state))
