"""What a session may count, keep or share."""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from mlx_audit.caches import FixedCapacityKVCache as Cache
from mlx_audit.decode import CompiledDecodeSession as Session
from mlx_audit.decode import DecodeStep
from mlx_audit.faults.base import Patch, fault


@fault("ENV001")
def position_as_python_int(patch: Patch) -> None:
    """The host's position goes into the compiled call: one trace a token."""
    own = DecodeStep.__call__

    def call(self: DecodeStep, parameters: Any, state: Any, tokens: Any, pos: int | None = None) -> Any:
        return own(self, parameters, state, tokens)

    patch.setattr(DecodeStep, "__call__", call)
    own_compiled = Session._compiled

    def compiled(self: Session, count: int) -> Any:
        function = own_compiled(self, count)
        return lambda *arguments: function(*arguments, self._position)

    patch.setattr(Session, "_compiled", compiled)


@fault("CAP001")
def step_counts_two(patch: Patch) -> None:
    """The host counts each token twice."""
    own = Session._commit
    patch.setattr(Session, "_commit", lambda self, logits, state, count: own(self, logits, state, 2 * count))


@fault("CAP001")
def guard_too_early(patch: Patch) -> None:
    """The last slot is never used."""
    own = Session._reserve
    patch.setattr(Session, "_reserve", lambda self, count, call: own(self, count + 1, call))


@fault("CAP002")
def guard_too_late(patch: Patch) -> None:
    """One token more than fits is let through; run it in a process of its own."""
    own = Session._reserve
    patch.setattr(Session, "_reserve", lambda self, count, call: own(self, count - 1, call))


@fault("CAP001")
def capacity_without_the_prompt(patch: Patch) -> None:
    """Only generated tokens are counted; run it in a process of its own."""
    own = Session.prefill

    def prefill(self: Session, tokens: Any, lengths: Any = None) -> mx.array:
        logits = own(self, tokens, lengths)
        self._prompt = self._position  # type: ignore[attr-defined]
        return logits

    def remaining(self: Session) -> int:
        return self.capacity - self._position + int(getattr(self, "_prompt", 0))

    patch.setattr(Session, "prefill", prefill)
    patch.setattr(Session, "remaining", property(remaining))


@fault("CAP002")
def refused_call_counts(patch: Patch) -> None:
    """A refused token moves the position."""
    own = Session._reserve

    def reserve(self: Session, count: int, call: str) -> None:
        try:
            own(self, count, call)
        except BaseException:
            self._position -= 1
            raise

    patch.setattr(Session, "_reserve", reserve)


@fault("LIF001")
def failed_step_advances(patch: Patch) -> None:
    """The position moves before the run has succeeded."""
    own = Session.step

    def step(self: Session, tokens: Any) -> mx.array:
        self._position += 1
        logits = own(self, tokens)
        self._position -= 1
        return logits

    patch.setattr(Session, "step", step)


@fault("STA002")
def copies_share_everything(patch: Patch) -> None:
    """A copy is the session itself."""
    patch.setattr(Session, "copy", lambda self: self)


@fault("STA002")
def copies_share_their_list(patch: Patch) -> None:
    """A copy shares the list of states, into which a step puts the new ones."""
    own = Session.copy

    def copy(self: Session) -> Session:
        other = own(self)
        other._state = self._state
        return other

    own_commit = Session._commit

    def commit(self: Session, logits: mx.array, state: Any, count: int) -> None:
        held = self._state
        own_commit(self, logits, state, count)
        if held is not None:
            held[:] = state
            self._state = held

    patch.setattr(Session, "copy", copy)
    patch.setattr(Session, "_commit", commit)


@fault("STA003", needs="linear trims")
def trim_lies(patch: Patch) -> None:
    """A cache says that it trimmed, and did not."""
    patch.setattr(Cache, "trim", lambda self, n: n)


@fault("STA003")
def trim_changes_nothing_but_the_count(patch: Patch) -> None:
    """The session's trim moves nothing and says that it did."""
    patch.setattr(Session, "trim", lambda self, n: n)


@fault("STA003", needs="trims")
def trim_takes_what_there_is(patch: Patch) -> None:
    """Asked for more than there is, trim takes all."""
    own = Session.trim
    patch.setattr(Session, "trim", lambda self, n: own(self, min(n, self.position)))


@fault("STA003", needs="slots")
def refused_trim_trims_some_caches(patch: Patch) -> None:
    """Trim is refused, but the first cache has moved."""

    def trim(self: Session, n: int) -> int:
        state = self._require_state("trim")
        first = next(arrays for arrays in state if any(array.dtype == mx.int32 for array in arrays))
        first[:] = [array - 1 if array.dtype == mx.int32 else array for array in first]
        return 0

    patch.setattr(Session, "trim", trim)


@fault("LIF003")
def old_states_kept(patch: Patch) -> None:
    """Every state is kept in a list."""
    own, kept = Session._commit, []

    def commit(self: Session, logits: mx.array, state: Any, count: int) -> None:
        kept.append(state)
        own(self, logits, state, count)

    patch.setattr(Session, "_commit", commit)


@fault("LIF003")
def sessions_kept(patch: Patch) -> None:
    """Every session is kept in a list."""
    own, kept = Session.prefill, []

    def prefill(self: Session, tokens: Any, lengths: Any = None) -> mx.array:
        kept.append(self)
        return own(self, tokens, lengths)

    patch.setattr(Session, "prefill", prefill)
