"""What only an order of operations shows: each call is right by itself."""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from mlx_audit.caches.ring import RingCache as Ring
from mlx_audit.caches.slots import SlottedCache
from mlx_audit.decode import CompiledDecodeSession as Session
from mlx_audit.decode import session as sessions
from mlx_audit.decode.saved import SavedState
from mlx_audit.faults.base import Patch, fault


@fault("STA006", needs="trims")
def copies_share_after_a_trim(patch: Patch) -> None:
    """A session that was trimmed goes on as one with its copy."""
    own = Session.copy
    _after_trim(patch)
    patch.setattr(Session, "copy", lambda self: self if _taken_back(self) else own(self))


@fault("STA006", needs="trims")
def saved_at_the_highest_position(patch: Patch) -> None:
    """What is saved counts tokens that were taken back."""
    _after_trim(patch)

    def save(self: Session, path: Any) -> None:
        state = self._require_state("save")
        sessions.save_state(path, self._step, state, self._position + _taken_back(self))

    patch.setattr(Session, "save", save)


@fault("STA006", needs="trims")
def room_of_trimmed_tokens_is_lost(patch: Patch) -> None:
    """Tokens that were taken back still count against the capacity."""
    own = Session.remaining
    _after_trim(patch)
    patch.setattr(Session, "remaining", property(lambda self: own.fget(self) - _taken_back(self)))


@fault("STA006", needs="trims")
def failed_extend_after_a_trim_counts(patch: Patch) -> None:
    """After a trim, a continuation that fails has moved the position already."""
    own = Session.extend
    _after_trim(patch)

    def extend(self: Session, tokens: Any) -> mx.array:
        try:
            return own(self, tokens)
        except BaseException:
            self._position += bool(_taken_back(self))
            raise

    patch.setattr(Session, "extend", extend)


@fault("STA006", needs="slots")
def trim_leaves_the_count_of_the_host(patch: Patch) -> None:
    """A cache's position goes back, and what the host knows of it does not."""
    own = SlottedCache.trim

    def trim(self: SlottedCache, n: int) -> int:
        held = self.count()
        done = own(self, n)
        self._held = held
        return done

    patch.setattr(SlottedCache, "trim", trim)


@fault("STA006", needs="ring")
def adopted_ring_has_not_turned(patch: Patch) -> None:
    """A ring knows from its own writes alone that it has turned: one that was adopted says that it can trim."""
    own = Ring.update_and_fetch

    def update_and_fetch(self: Ring, keys: mx.array, values: mx.array) -> Any:
        full = (self.count() or 0) + keys.shape[2] > self.slots
        self._turned = getattr(self, "_turned", False) or full
        return own(self, keys, values)

    patch.setattr(Ring, "update_and_fetch", update_and_fetch)
    patch.setattr(Ring, "_can_forget", lambda self, n: not getattr(self, "_turned", False))


@fault("STA006")
def a_second_load_gives_the_first(patch: Patch) -> None:
    """What was loaded is remembered by its layout, and given again for the next file."""
    own, known = SavedState.state_for, {}

    def state_for(self: SavedState, step: Any) -> Any:
        state = own(self, step)
        layout = str([[(array.shape, array.dtype) for array in arrays] for arrays in state])
        return known.setdefault(layout, state)

    patch.setattr(SavedState, "state_for", state_for)


def _after_trim(patch: Patch) -> None:
    """Let each session remember how many tokens it took back."""
    own = Session.trim

    def trim(self: Session, n: int) -> int:
        done = own(self, n)
        self._back = _taken_back(self) + done
        return done

    patch.setattr(Session, "trim", trim)


def _taken_back(session: Session) -> int:
    return getattr(session, "_back", 0)
