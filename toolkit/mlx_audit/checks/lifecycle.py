"""What must survive: failures, new weights, long runs."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_audit.adapters import parameter_slots
from mlx_audit.checks.base import Check, CheckFailed, Figures
from mlx_audit.checks.failing import failing, middle_layer, must_fail
from mlx_audit.checks.memory import active_memory, growth_since, no_spare_buffers
from mlx_audit.checks.runs import (
    PROMPT,
    Comparer,
    Eager,
    eager_logits,
    live_arrays,
    session_for,
    state_bytes,
    teacher_tokens,
)
from mlx_audit.checks.subject import Subject

_LONG = 64


class FailureLeavesAll(Check):
    """A failure before evaluation leaves everything as it was.

    What it does:
        Makes a layer raise during the first compiled call, and during the second chunk of a prefill. Position, state
        bytes and trace count must be as before, the module may hold no placeholder, and the next call must be right.

    Why:
        MLX fills captured state with placeholders while it traces, and leaves them there when the trace fails: the
        next use raises "eval an array without a primitive", or is wrong.

    Example:
        after a failed trace: the module holds a placeholder of a trace

    How to fix:
        Pass state as arguments and results; put the module's arrays back in `finally`.

    Sources:
        ml-explore/mlx#3635; huggingface/transformers.js#1745 (length advanced before the run succeeded)
    """

    code = "LIF001"
    tier = "numeric"
    requires = ("PAR001",)
    repeated = False

    def run(self, subject: Subject) -> Figures:
        model = subject.tiny_model(subject.dtype)
        layer = middle_layer(model)
        tokens = teacher_tokens(subject, PROMPT + 2, stream=13)
        wanted = eager_logits(model, tokens[:PROMPT], tokens[PROMPT:])
        session = session_for(subject, PROMPT + 2, model=model, prefill_step_size=5)
        comparer = Comparer(subject.tolerance)
        with failing(layer, after=1):
            must_fail(lambda: session.prefill([tokens[:PROMPT]]), "the second chunk of a prefill")
        self._unchanged(session, model, 0, None, "a failed prefill")
        logits = session.prefill([tokens[:PROMPT]])
        comparer.check(logits, Eager(model).feed(tokens[:PROMPT], chunk=5), "prefill after a failed one")
        before = state_bytes(session.state)
        with failing(layer):
            must_fail(lambda: session.step([tokens[PROMPT]]), "the first compiled call")
        self._unchanged(session, model, PROMPT, before, "a failed trace")
        with failing(layer):
            must_fail(lambda: session.extend([tokens[PROMPT:]]), "extend")
        self._unchanged(session, model, PROMPT, before, "a failed extend")
        chunked = Eager(model)
        chunked.feed(tokens[:PROMPT], chunk=5)
        for step, token in enumerate(tokens[PROMPT:], start=1):
            comparer.check(session.step([token]), chunked.feed([token]), f"step {step} after the failures")
        if session.trace_count != 1:
            raise CheckFailed(f"traced {session.trace_count} times, wanted 1")
        return {**comparer.figures(), "failures": 3, "prompt_logits": len(wanted)}

    @staticmethod
    def _unchanged(
        session: Any, model: nn.Module, position: int, state: list[bytes] | None, label: str
    ) -> None:
        live_arrays(model)
        if session.position != position or session.trace_count != 0:
            raise CheckFailed(
                f"after {label}: position {session.position}, {session.trace_count} traces", where=label
            )
        if state is not None and state_bytes(session.state) != state:
            raise CheckFailed(f"{label} changed the state", where=label)


class ChangedWeightsCount(Check):
    """Weights that are replaced or changed in place count at the next step.

    What it does:
        After three compiled steps replaces every weight by a changed one, steps, changes weights in place, steps again,
        and compares with eager decoding on the same caches with the new weights. There is still only one trace.

    Why:
        A trace bakes in the weights that it captures. After an adapter is loaded, or a training step, the compiled
        model would go on with the old ones.

    Example:
        logits differ at the step after weights were replaced

    How to fix:
        Gather parameters from the module at each call and pass them as inputs.

    Sources:
        ml-explore/mlx-swift-lm#586, #589
    """

    code = "LIF002"
    tier = "numeric"
    requires = ("PAR001",)
    repeated = False

    def run(self, subject: Subject) -> Figures:
        model = subject.tiny_model(subject.dtype)
        tokens = teacher_tokens(subject, PROMPT + 7, stream=14)
        session, eager = session_for(subject, PROMPT + 7, model=model), Eager(model)
        session.prefill([tokens[:PROMPT]])
        eager.feed(tokens[:PROMPT])
        for token in tokens[PROMPT : PROMPT + 3]:
            session.step([token])
            old = eager.feed([token])
        comparer = Comparer(subject.tolerance)
        slots = parameter_slots(model)
        for change, piece in (
            ("replaced", tokens[PROMPT + 3 : PROMPT + 5]),
            ("changed in place", tokens[PROMPT + 5 :]),
        ):
            for slot in slots:
                if change == "replaced":
                    slot.container[slot.key] = slot.container[slot.key] * 0.5
                else:
                    slot.container[slot.key][...] = slot.container[slot.key] * 1.5
            for step, token in enumerate(piece, start=1):
                want = eager.feed([token])
                comparer.check(session.step([token]), want, f"step {step} after weights were {change}")
        if session.trace_count != 1:
            raise CheckFailed(f"traced {session.trace_count} times, wanted 1", figures=comparer.figures())
        if bool(mx.array_equal(old, want).item()):
            raise CheckFailed(
                "the new weights changed nothing in eager decoding either, so nothing was tested"
            )
        return {**comparer.figures(), "weights": len(slots), "traces": session.trace_count}


class MemoryFlat(Check):
    """Memory and traces stay flat over many steps and sessions.

    What it does:
        Takes many steps in one session, then makes, uses and drops several sessions, and compares MLX's active memory
        before and after; one trace a session.

    Why:
        A cache that keeps its previous buffers, or a compile cache that keeps every session, fills the machine slowly.

    Example:
        active memory grew by 4,096 bytes over 32 steps

    How to fix:
        Let go of the old state before evaluation; make no reference cycle through the compiled function.

    Sources:
        ml-explore/mlx#3964; osaurus-ai/vmlx-swift#215 (a compile cache that kept whole models)
    """

    code = "LIF003"
    tier = "numeric"
    requires = ("PAR001",)
    repeated = False

    def run(self, subject: Subject) -> Figures:
        tokens = teacher_tokens(subject, _LONG, stream=15)
        with no_spare_buffers():
            steps, traces = _growth_over_steps(subject, tokens)
            if steps > 0 or traces != 1:
                raise CheckFailed(
                    f"active memory grew by {steps} bytes over {_LONG - 5} steps, with {traces} traces, "
                    "wanted 0 and 1"
                )
            growth = _growth_over_sessions(subject, tokens)
        if growth > 0:
            raise CheckFailed(
                f"active memory grew by {growth} bytes over {subject.amounts.sessions - 2} sessions, wanted 0"
            )
        figures = {"steps": _LONG - 5, "sessions": subject.amounts.sessions}
        return {**figures, "growth_bytes": max(0, growth, steps)}


def _growth_over_steps(subject: Subject, tokens: list[int]) -> tuple[int, int]:
    """Return by how many bytes active memory grew over the steps of one session, and its traces."""
    session = session_for(subject, _LONG)
    session.prefill([tokens[:4]])
    session.step([tokens[4]])
    start = active_memory()
    for token in tokens[5:]:
        session.step([token])
    return growth_since(start), session.trace_count


def _growth_over_sessions(subject: Subject, tokens: list[int]) -> int:
    """Return by how many bytes active memory grew from the second session to the last."""
    start = 0
    for count in range(subject.amounts.sessions):
        session = session_for(subject, 16)
        session.prefill([tokens[:4]])
        session.step([tokens[4]])
        del session
        if count == 1:
            start = active_memory()
    return growth_since(start)
