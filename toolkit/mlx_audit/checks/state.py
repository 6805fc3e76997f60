"""Is the state right, not only the logits? A constant shift of every position is invisible in logits."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from mlx_audit.checks.base import Check, CheckFailed, Figures
from mlx_audit.checks.compared import compare_states, require_one_slot_written
from mlx_audit.checks.parts import PartSpec, named_parts, rings_of, specs_of, written_specs
from mlx_audit.checks.runs import (
    PROMPT,
    Comparer,
    Eager,
    same_bytes,
    session_for,
    state_bytes,
    teacher_tokens,
)
from mlx_audit.checks.scenario import Scenario, during
from mlx_audit.checks.subject import Subject
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
        first = _Pair(subject, PROMPT + steps + 2, "the first session")
        with during(Scenario(PROMPT, steps, PROMPT + steps + 2, stream=4, dtype=subject.dtype)):
            first.prefill(tokens[:PROMPT])
            for token in tokens[PROMPT:]:
                first.step(token)
        # A second one begins with a single token; then the first goes on: neither may see that the other was there.
        second = _Pair(subject, _STEPS + 1, "a second session")
        with during(Scenario(1, _STEPS, stream=4, dtype=subject.dtype)):
            second.prefill(tokens[:1])
            for token in tokens[1 : _STEPS + 1]:
                second.step(token)
            first.step(tokens[0])
        worst = max(first.worst, second.worst)
        return {"steps": steps, "caches": len(first.eager.cache), "max_difference": worst}


class _Pair:
    """A compiled session and eager decoding, fed the same tokens, whose states are compared after each."""

    def __init__(self, subject: Subject, capacity: int, name: str) -> None:
        self.session, self.eager = session_for(subject, capacity), Eager(subject.model)
        self.worst = 0.0
        self._subject, self._name, self._steps = subject, name, 0

    def prefill(self, tokens: list[int]) -> None:
        """Read a prompt both ways."""
        self.session.prefill([tokens])
        self.eager.feed(tokens)
        self._compare(f"the prompt of {self._name}")

    def step(self, token: int) -> None:
        """Take a token both ways; the compiled step writes one slot."""
        self._steps += 1
        before, label = self.session.caches, f"step {self._steps} of {self._name}"
        self.session.step([token])
        self.eager.feed([token])
        require_one_slot_written(before, self.session.caches, label)
        self._compare(label)

    def _compare(self, label: str) -> None:
        self.worst = max(self.worst, compare_states(self._subject, self.session, self.eager.cache, label))


class CopiesIndependent(Check):
    """A copy and its original don't see each other.

    What it does:
        Copies a session, steps the copy, then the original, with different tokens, and compares both with eager
        decoding; each one's bytes stay as they were while the other moves. Before and after, both count one trace, the
        same: a copy compiles nothing.

    Why:
        Beam search and speculative decoding branch. A shared buffer would be overwritten by whoever steps last. A step
        that is compiled again for each branch costs more than it saves.

    Example:
        stepping the copy changed the original's state

    How to fix:
        Rebind arrays instead of changing them in place; `a += 1` changes every alias. Let copies share
        the compiled step.

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
        _require_one_trace(original, copy, "before the copy steps")
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
        _require_one_trace(original, copy, "after both stepped")
        return comparer.figures()


def _require_one_trace(original: CompiledDecodeSession, copy: CompiledDecodeSession, label: str) -> None:
    """Require that two sessions count one trace, the same: a copy that compiles by itself counts none at first."""
    counts = original.trace_count, copy.trace_count
    if counts != (1, 1):
        raise CheckFailed(
            f"{label} the original counts {counts[0]} traces and the copy {counts[1]}, wanted one that they share"
        )


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
