"""What may be wrong with compiling itself: it does not happen, it happens too often, or it holds on to what it saw."""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from mlx_audit.decode import CompiledDecodeSession as Session
from mlx_audit.decode import DecodeStep
from mlx_audit.decode import session as sessions
from mlx_audit.decode.counted import CountedCompile
from mlx_audit.faults.base import Patch, fault


@fault("ENV001")
def compiling_is_silently_off(patch: Patch) -> None:
    """The step runs as plain Python at each call: right, slow, and no proof of anything."""
    own = CountedCompile.__init__

    def init(self: CountedCompile, function: Any) -> None:
        own(self, function)

        def plain(*arguments: Any) -> Any:
            result = function(*arguments)
            self._count.traces += 1
            return result

        self._compiled = plain

    patch.setattr(CountedCompile, "__init__", init)


@fault("PAR001", needs="slots")
def a_rung_for_every_token(patch: Patch) -> None:
    """Each step attends over exactly the slots that are filled: another shape, and another trace, every time."""
    patch.setattr(
        Session, "_rung", lambda self, count: min(self._position + count, self._slots or self.capacity)
    )


@fault("TRC004")
def state_baked_in(patch: Patch) -> None:
    """One array of the state is a constant of the step, whatever it is given."""
    own = DecodeStep.__call__

    def call(self: DecodeStep, parameters: Any, state: Any, tokens: Any) -> Any:
        first = next(index for index, arrays in enumerate(state) if arrays)
        baked = mx.zeros(state[first][0].shape, state[first][0].dtype)
        kept = [[baked, *arrays[1:]] if index == first else arrays for index, arrays in enumerate(state)]
        return own(self, parameters, kept, tokens)

    patch.setattr(DecodeStep, "__call__", call)


@fault("LIF003")
def states_are_never_evaluated(patch: Patch) -> None:
    """A step hands out logits and leaves its state as a promise: the graph behind it grows with the text."""

    def commit(self: Session, logits: mx.array, state: Any, count: int) -> None:
        self._state, self._position = state, self._position + count

    patch.setattr(Session, "_commit", commit)


@fault("STA002")
def a_trace_for_every_session(patch: Patch) -> None:
    """A copy of a session compiles its step again."""
    own = Session.copy

    def copy(self: Session) -> Session:
        other = own(self)
        other._rungs = {}
        return other

    patch.setattr(Session, "copy", copy)


@fault("LIF004")
def models_kept(patch: Patch) -> None:
    """Every model that was ever compiled stays in a list."""
    own, kept = DecodeStep.__init__, []

    def init(self: DecodeStep, model: Any, caches: Any) -> None:
        kept.append(model)
        own(self, model, caches)

    patch.setattr(DecodeStep, "__init__", init)


@fault("LIF004")
def caches_kept(patch: Patch) -> None:
    """The caches of every prompt stay in a list."""
    own, kept = Session.prefill, []

    def prefill(self: Session, tokens: Any, lengths: Any = None) -> mx.array:
        logits = own(self, tokens, lengths)
        kept.append(self.caches)
        return logits

    patch.setattr(sessions.CompiledDecodeSession, "prefill", prefill)
