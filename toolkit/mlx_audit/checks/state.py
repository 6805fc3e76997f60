"""Is the state right, not only the logits? A constant shift of every position is invisible in logits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_audit.caches import host_int
from mlx_audit.checks.base import Check, CheckFailed, Figures
from mlx_audit.checks.runs import (
    PROMPT,
    Comparer,
    Eager,
    same_bytes,
    session_for,
    state_bytes,
    teacher_tokens,
)
from mlx_audit.checks.subject import Subject
from mlx_audit.checks.tolerance import largest, largest_difference
from mlx_audit.decode import CompiledDecodeSession

_STEPS = 6


class StateEqualsEager(Check):
    """The cache state equals eager decoding's, slot by slot.

    What it does:
        After the prompt and after each compiled step, turns the caches back into native ones and compares every array
        with eager decoding's. Between two steps the slot at the write index must change, and no other.

    Why:
        Rotary embeddings are relative: keys that are all rotated by one position too many give the right logits, until
        a cache is handed over. A write that is dropped leaves the state as it was, and the model repeats itself.

    Example:
        caches[2] differs from eager's at step 3, slot 16; state unchanged by a step (step 1, caches[0])

    How to fix:
        Look at the position that keys are rotated by, and at the slot that they are written to.

    Sources:
        a write dropped at a full window: Pushkinist/rMLX#238
    """

    code = "STA001"
    tier = "numeric"
    requires = ("PAR001",)

    def run(self, subject: Subject) -> Figures:
        tokens = teacher_tokens(subject, PROMPT + _STEPS, stream=4)
        session, eager = session_for(subject, PROMPT + _STEPS + 2), Eager(subject.model)
        session.prefill([tokens[:PROMPT]])
        eager.feed(tokens[:PROMPT])
        worst = compare_states(subject, session, eager.cache, "the prompt")
        for step, token in enumerate(tokens[PROMPT:], start=1):
            before = session.caches
            session.step([token])
            eager.feed([token])
            require_one_slot_written(before, session.caches, f"step {step}")
            worst = max(worst, compare_states(subject, session, eager.cache, f"step {step}"))
        return {"steps": _STEPS, "caches": len(eager.cache), "max_difference": worst}


class CopiesIndependent(Check):
    """A copy and its original don't see each other.

    What it does:
        Copies a session, steps the copy, then the original, with different tokens, and compares both with eager
        decoding; each one's bytes stay as they were while the other moves.

    Why:
        Beam search and speculative decoding branch. A shared buffer would be overwritten by whoever steps last.

    Example:
        stepping the copy changed the original's state

    How to fix:
        Rebind arrays instead of changing them in place; `a += 1` changes every alias.

    Sources:
        ml-explore/mlx-lm#1806 (an offset advanced in place)
    """

    code = "STA002"
    tier = "numeric"
    requires = ("STA001",)
    repeated = False

    def run(self, subject: Subject) -> Figures:
        tokens = teacher_tokens(subject, PROMPT + 4, stream=5)
        prompt, (one, two, three, four) = tokens[:PROMPT], tokens[PROMPT:]
        original = session_for(subject, PROMPT + 4)
        original.prefill([prompt])
        original.step([one])
        copy = original.copy()
        comparer = Comparer(subject.tolerance)
        moves = (
            ("copy", copy, original, [one, two]),
            ("original", original, copy, [one, three]),
            ("copy", copy, original, [one, two, four]),
        )
        for name, mover, other, history in moves:
            before = state_bytes(other.state)
            logits = mover.step([history[-1]])
            if state_bytes(other.state) != before:
                raise CheckFailed(f"stepping the {name} changed the other session's state")
            comparer.check(logits, _forced(subject, prompt, history), f"step of the {name}")
        return comparer.figures()


class TrimExact(Check):
    """Trimming is exact, or is refused and changes nothing.

    What it does:
        Trims 1, 3 and all steps, continues with other tokens and compares with a run that never saw the trimmed ones;
        asks for more than there is, for 0 and for a negative number, which must return 0 and change no byte.

    Why:
        Speculative decoding and edited prompts take tokens back. Caches exist that cut although they say they cannot.

    Example:
        trim(20) at position 16 returned 20, wanted 0

    How to fix:
        Move the position back, or refuse before anything is changed.

    Sources:
        ml-explore/mlx-lm#1776, #1494
    """

    code = "STA003"
    tier = "numeric"
    requires = ("STA001", "MSK001")
    repeated = False

    def run(self, subject: Subject) -> Figures:
        tokens = teacher_tokens(subject, PROMPT + 8, stream=6)
        prompt, forced, other = tokens[:PROMPT], tokens[PROMPT : PROMPT + 4], tokens[PROMPT + 4 :]
        base = session_for(subject, PROMPT + 8)
        base.prefill([prompt])
        for token in forced:
            base.step([token])
        comparer, trims = Comparer(subject.tolerance), []
        for n in (1, 3, 4):
            session = base.copy()
            trimmed = session.trim(n)
            if trimmed not in (0, n) or session.position != base.position - trimmed:
                raise CheckFailed(f"trim({n}) returned {trimmed} and left position {session.position}")
            if not trimmed and not same_bytes(session.state, base.state):
                raise CheckFailed(f"trim({n}) was refused and changed the state")
            trims.append(trimmed)
            kept = forced[: len(forced) - trimmed]
            for count, token in enumerate(other[:2], start=1):
                want = _forced(subject, prompt, [*kept, *other[:count]])
                comparer.check(session.step([token]), want, f"step {count} after trim({n})")
        for n in (base.position + 1, 0, -1):
            session = base.copy()
            if session.trim(n) != 0 or not same_bytes(session.state, base.state):
                raise CheckFailed(
                    f"trim({n}) at position {base.position} was not refused, or changed the state"
                )
        return {**comparer.figures(), "trimmed": trims}


def compare_states(subject: Subject, session: CompiledDecodeSession, natives: list[Any], label: str) -> float:
    """Compare a session's caches with native ones and return the largest difference.

    Raises:
        CheckFailed: names the cache and the slot.
    """
    worst = 0.0
    for index, (cache, native) in enumerate(zip(session.caches, natives, strict=True)):
        for got, want in zip(_arrays(cache.to_native()), _arrays(native), strict=True):
            if got.shape != want.shape:
                raise CheckFailed(f"caches[{index}] holds {got.shape} at {label}, eager holds {want.shape}")
            if not subject.tolerance.accepts(got, want):
                gap = mx.abs(got.astype(mx.float32) - want.astype(mx.float32))
                slot = host_int(mx.argmax(mx.max(gap, axis=(0, 1, 3))))
                raise CheckFailed(
                    f"caches[{index}] differs from eager's at {label}, slot {slot}, by {largest(gap):.3g}",
                    where=f"{label}, caches[{index}], slot {slot}",
                )
            worst = max(worst, largest_difference(got, want))
    return worst


def require_one_slot_written(before: list[Any], after: list[Any], label: str) -> None:
    """Require that a step changed the slot at the write index, and no other.

    Raises:
        CheckFailed: nothing changed ("state unchanged by a step"), or another slot did.
    """
    for index, (old, new) in enumerate(zip(before, after, strict=True)):
        slot = host_int(old.slot)
        written: set[int] = set()
        for was, now in zip(old.state, new.state, strict=True):
            if was.ndim == 4:
                written |= set(_changed_slots(was, now))
        if not written:
            raise CheckFailed(
                f"state unchanged by a step ({label}, caches[{index}])", where=f"{label}, caches[{index}]"
            )
        if written != {slot}:
            raise CheckFailed(
                f"{label} wrote slots {sorted(written)} of caches[{index}], wanted {slot} alone",
                where=f"{label}, caches[{index}]",
            )


def _changed_slots(was: mx.array, now: mx.array) -> Iterator[int]:
    axes = (0, 1, 3)
    changed = np.array(mx.any(mx.view(was, mx.uint8) != mx.view(now, mx.uint8), axis=axes))
    return (int(slot) for slot in np.flatnonzero(changed))


def _arrays(native: Any) -> list[mx.array]:
    """Return what a native cache holds, without its spare room."""
    return list(native.keys_and_values())


def _forced(subject: Subject, prompt: list[int], tokens: list[int]) -> mx.array:
    eager = Eager(subject.model)
    logits = eager.feed(prompt)
    for token in tokens:
        logits = eager.feed([token])
    return logits
