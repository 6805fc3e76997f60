"""Is the state right, not only the logits? A constant shift of every position is invisible in logits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import ArraysCache

from mlx_audit.caches import FixedCapacityCache, host_float, host_int
from mlx_audit.checks.base import Check, CheckFailed, Figures
from mlx_audit.checks.content import content, leaves, readable, rounding
from mlx_audit.checks.parts import PartSpec, named_parts, parts_of, rings_of, specs_of, written_specs
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
from mlx_audit.checks.tolerance import Tolerance, largest, largest_difference
from mlx_audit.decode import CompiledDecodeSession

_STEPS = 6


class StateEqualsEager(Check):
    """The cache state equals eager decoding's, slot by slot.

    What it does:
        After the prompt and after each compiled step, turns the caches back into native ones and compares every array
        with eager decoding's, for two turns of each ring. Between two steps the slot at the write index must change,
        and no other; of a recurrent state at least one array; a cache that the forward never writes stays empty.

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
        # Each ring turns twice after the prompt.
        steps = max([_STEPS, *(2 * ring + 1 for ring in rings_of(specs_of(subject)))])
        tokens = _distinct_tokens(subject, PROMPT + steps, stream=4)
        session, eager = session_for(subject, PROMPT + steps + 2), Eager(subject.model)
        session.prefill([tokens[:PROMPT]])
        eager.feed(tokens[:PROMPT])
        worst = compare_states(subject, session, eager.cache, "the prompt")
        for step, token in enumerate(tokens[PROMPT:], start=1):
            before = session.caches
            session.step([token])
            eager.feed([token])
            require_one_slot_written(before, session.caches, f"step {step}")
            worst = max(worst, compare_states(subject, session, eager.cache, f"step {step}"))
        return {"steps": steps, "caches": len(eager.cache), "max_difference": worst}


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
        Trims 1, 3 and all steps, continues with other tokens and compares with a run that never saw the trimmed ones.
        Rings are tried just full, just turned, and turned long ago: where a ring has turned, or a recurrent state has
        taken a token in, 0 must be returned and nothing change, in any cache of the stack. Asks for more than there
        is, for 0 and for a negative number, which must return 0 and change no byte.

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
        specs = written_specs(subject)
        texts = [(PROMPT, 4, (1, 3, 4)), *_edges(rings_of(specs))]
        base = session_for(subject, max(prompt + steps for prompt, steps, _ in texts) + 2)
        comparer, trims = Comparer(subject.tolerance), []
        for prompt, steps, amounts in texts:
            tokens = teacher_tokens(subject, prompt + steps + 2, stream=6)
            session = base.copy()
            session.prefill([tokens[:prompt]])
            for token in tokens[prompt:-2]:
                session.step([token])
            for n in amounts:
                trimmed = _trimmed(session.copy(), n, specs)
                trims.append(session.position - trimmed.position)
                _require_same(comparer, trimmed, tokens, prompt, f"trim({n})")
            for n in (session.position + 1, 0, -1):
                _require_refused(session, n)
        return {**comparer.figures(), "trimmed": trims}


def _edges(rings: Sequence[int]) -> list[tuple[int, int, tuple[int, ...]]]:
    """Return prompts, steps and trims: rings that are just full, that have just turned, and that turned long ago."""
    texts: list[tuple[int, int, tuple[int, ...]]] = []
    for ring in rings:
        steps = min(4, ring - 1)
        texts += [(ring - steps, steps, (1, steps))] if steps else []
        texts += [(max(1, ring - 3), min(4, ring), (1,)), (ring + 5, 7, (6,))]
    return texts


def _trimmed(session: CompiledDecodeSession, n: int, specs: Sequence[PartSpec]) -> CompiledDecodeSession:
    """Trim a session, which must be exact where every part still has all that it needs, and refused elsewhere."""
    before, position = session.state, session.position
    wanted = n if all(spec.forgets(position, n) for spec in specs) else 0
    trimmed = session.trim(n)
    if not trimmed and not same_bytes(session.state, before):
        raise CheckFailed(f"trim({n}) was refused and changed the state")
    if (trimmed, session.position) != (wanted, position - trimmed):
        raise CheckFailed(
            f"trim({n}) at position {position} returned {trimmed} and left position {session.position}, "
            f"wanted {wanted} and {position - wanted}"
        )
    for name, part in named_parts(session.caches):
        if part.slots and part.count() != session.position:
            raise CheckFailed(
                f"after trim({n}) {name} stands at {part.count()}, wanted {session.position}", where=name
            )
    return session


def _require_same(
    comparer: Comparer, session: CompiledDecodeSession, tokens: list[int], prompt: int, label: str
) -> None:
    """Feed the last two tokens and compare with eager decoding that never saw the trimmed ones."""
    eager = Eager(session.model)
    eager.feed(tokens[:prompt])
    for token in tokens[prompt : session.position]:
        eager.feed([token])
    for count, token in enumerate(tokens[-2:], start=1):
        comparer.check(session.step([token]), eager.feed([token]), f"step {count} after {label}")


def _require_refused(base: CompiledDecodeSession, n: int) -> None:
    session = base.copy()
    if session.trim(n) != 0 or not same_bytes(session.state, base.state):
        raise CheckFailed(f"trim({n}) at position {base.position} was not refused, or changed the state")


def compare_states(subject: Subject, session: CompiledDecodeSession, natives: list[Any], label: str) -> float:
    """Compare a session's caches with native ones and return the largest difference.

    Raises:
        CheckFailed: names the cache and the token or array.
    """
    wanted = leaves(natives)
    parts = parts_of(session.caches, [PartSpec.of(native) for native in wanted])
    own = leaves(cache.to_native() for cache in session.caches)
    pairs = zip(parts, own, wanted, strict=True)
    return max(
        (_compare(subject.tolerance, part.name, got, want, label) for part, got, want in pairs), default=0.0
    )


def _compare(tolerance: Tolerance, name: str, own: Any, native: Any, label: str) -> float:
    """Compare what two mlx-lm caches hold; where sums may differ in order, a quantized number may be its neighbour."""
    read = readable if tolerance.relative else content
    pairs = list(zip(read(own), read(native), strict=False))
    if len(read(own)) != len(read(native)):
        raise CheckFailed(f"{name} holds {len(read(own))} arrays at {label}, eager holds {len(read(native))}")
    for index, (got, want) in enumerate(pairs):
        if got.shape != want.shape:
            raise CheckFailed(f"{name} holds {got.shape} at {label}, eager holds {want.shape}")
        if got.dtype != want.dtype:
            raise CheckFailed(f"{name} holds {got.dtype} at {label}, eager holds {want.dtype}")
        if not _same(tolerance, got, want, rounding(native)[index] if tolerance.relative else 0.0):
            gap = mx.abs(got.astype(mx.float32) - want.astype(mx.float32))
            what = _place(native, gap, index)
            raise CheckFailed(
                f"{name} differs from eager's at {label}, {what}, by {largest(gap):.3g}",
                where=f"{label}, {name}, {what}",
            )
    return max((largest_difference(got, want) for got, want in pairs), default=0.0)


def _place(native: Any, gap: mx.array, index: int) -> str:
    """Return where two caches differ most: a slot; the place in time of what a ring holds; or an array of a state."""
    if isinstance(native, ArraysCache):
        return f"array {index}"
    at = host_int(mx.argmax(mx.max(gap, axis=(0, 1, 3))))
    return f"slot {at}" if PartSpec.of(native).ring is None else f"token {at} of {gap.shape[2]} held"


def _same(tolerance: Tolerance, got: mx.array, want: mx.array, slack: mx.array | float) -> bool:
    if not mx.issubdtype(got.dtype, mx.floating):
        return bool(mx.array_equal(got, want).item())
    gap = mx.abs(got.astype(mx.float32) - want.astype(mx.float32)) - slack
    return not got.size or host_float(mx.max(gap)) <= tolerance.relative * max(largest(want), 1e-30)


def require_one_slot_written(
    before: Sequence[FixedCapacityCache], after: Sequence[FixedCapacityCache], label: str
) -> None:
    """Require that a step wrote each part where it must, and nowhere else.

    In slots, exactly the one at the write index; of a state, at least one array; a cache that the forward never
    writes stays empty. A buffer that is zero before and after is not in use.

    Raises:
        CheckFailed: nothing changed ("state unchanged by a step"), or another slot did.
    """
    for (name, old), (_, new) in zip(named_parts(before), named_parts(after), strict=True):
        where, arrays = f"{label}, {name}", list(zip(old.state, new.state, old.roles, strict=True))
        written = {slot for was, now, role in arrays if role == "buffer" for slot in _changed_slots(was, now)}
        replaced = any(role == "recurrent" and _changed(was, now) for was, now, role in arrays)
        if arrays and not written and not replaced:
            raise CheckFailed(f"state unchanged by a step ({where})", where=where)
        if old.slots and written != {slot := host_int(old.slot)}:  # type: ignore[attr-defined]
            raise CheckFailed(
                f"{label} wrote slots {sorted(written)} of {name}, wanted {slot} alone", where=where
            )


def _changed(was: mx.array, now: mx.array) -> bool:
    same = mx.array_equal(mx.view(was, mx.uint8), mx.view(now, mx.uint8))
    return bool(was.size) and not bool(same.item())


def _changed_slots(was: mx.array, now: mx.array) -> Iterator[int]:
    if not was.size:
        return iter(())
    changed = np.array(mx.any(mx.view(was, mx.uint8) != mx.view(now, mx.uint8), axis=(0, 1, 3)))
    return (int(slot) for slot in np.flatnonzero(changed))


def _distinct_tokens(subject: Subject, count: int, *, stream: int) -> list[int]:
    """Return random tokens that come again only after all others: equal ones could leave a slot of a ring as it was."""
    order = np.random.default_rng([subject.seed, stream]).permutation(subject.vocabulary)
    return [int(order[index % len(order)]) for index in range(count)]


def _forced(subject: Subject, prompt: list[int], tokens: list[int]) -> mx.array:
    eager = Eager(subject.model)
    logits = eager.feed(prompt)
    for token in tokens:
        logits = eager.feed([token])
    return logits
