"""What one session may leave for the next on the same model, and what a prompt of one token may lose."""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from mlx_audit.caches import FixedCapacityKVCache as Cache
from mlx_audit.caches.slots import SlottedCache
from mlx_audit.decode import CompiledDecodeSession as Session
from mlx_audit.faults.base import Patch, fault


@fault("STA001", needs="only_linear")
def position_kept_with_the_model(patch: Patch) -> None:
    """Sessions of one model share their position: the first goes on from where the second stands."""
    own_prefill, own_commit, own_state = Session.prefill, Session._commit, Session._require_state
    positions: list[mx.array] = []

    def keep(self: Session) -> None:
        positions[:] = [arrays[2] for arrays in self._state or []]

    def prefill(self: Session, tokens: Any, lengths: Any = None) -> mx.array:
        logits = own_prefill(self, tokens, lengths)
        keep(self)
        return logits

    def commit(self: Session, logits: mx.array, state: Any, count: int) -> None:
        own_commit(self, logits, state, count)
        keep(self)

    def require_state(self: Session, call: str) -> Any:
        pairs = zip(own_state(self, call), positions, strict=True)
        return [[keys, values, position] for (keys, values, _), position in pairs]

    patch.setattr(Session, "prefill", prefill)
    patch.setattr(Session, "_commit", commit)
    patch.setattr(Session, "_require_state", require_state)


@fault("STA001", needs="only_linear rope")
def rope_shifted_in_a_second_session(patch: Patch) -> None:
    """A second session counts on from a first, in its prompt too: rotary embeddings are relative, so logits hide it."""
    own, begun = Session.prefill, []

    def prefill(self: Session, tokens: Any, lengths: Any = None) -> mx.array:
        begun.append(self)
        if len(begun) == 1:
            return own(self, tokens, lengths)
        self._state = [cache.state for cache in self._step.caches]
        return self.extend(tokens)

    patch.setattr(Session, "prefill", prefill)
    patch.setattr(Cache, "offset", property(lambda self: self._position + 3 * (len(begun) > 1)))


@fault("STA001", needs="slots")
def prompt_of_one_token_dropped(patch: Patch) -> None:
    """A prompt of one token is counted and not taken over."""
    own = SlottedCache._placed

    def placed(self: SlottedCache, content: mx.array, held: int, time: int) -> mx.array:
        return own(self, content * (held > 1), held, time)

    patch.setattr(SlottedCache, "_placed", placed)
