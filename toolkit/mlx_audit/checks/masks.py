"""What masked slots may hold, and what the capacity may not change: properties drawn by Hypothesis inside the run."""

from __future__ import annotations

from functools import partial

import mlx.core as mx
from hypothesis import strategies as st

from mlx_audit.checks.base import Check, CheckFailed, Figures
from mlx_audit.checks.parts import (
    CAPACITY,
    POISON,
    Part,
    PartSpec,
    capacity_for,
    parts_of,
    poisoned,
    rings_of,
    slotted_kinds,
    specs_of,
    without_slots,
)
from mlx_audit.checks.properties import require_always
from mlx_audit.checks.runs import Comparer, session_for, teacher_tokens
from mlx_audit.checks.scenario import Scenario, during
from mlx_audit.checks.subject import Subject
from mlx_audit.checks.tolerance import Tolerance, largest_difference
from mlx_audit.decode import CompiledDecodeSession, State
from mlx_audit.evidence.environment import backend


class UnwrittenSlotsHidden(Check):
    """Poison in slots that hold no token changes nothing.

    What it does:
        Fills every slot that holds no token in sight of the next one (beyond the position, or about to be overwritten
        in a ring, or in another chunk) with large finite numbers and compares a compiled step and a chunk of three with
        the clean run; again after a trim, where the stale rows of forgotten tokens stay in place. All slots of the
        clean state must be finite.

    Why:
        A masked slot is still multiplied by zero, so a NaN left in one spreads: masked slots must be finite.

    Example:
        poison in slots that hold nothing for position 6 moved the logits of a step by 0.4

        caches[0] holds NaN or infinity: masked slots must be finite

    How to fix:
        Apply the mask in decode too; allocate buffers with zeros.

    Sources:
        vllm-project/vllm#43961
    """

    code = "MSK002"
    tier = "numeric"
    requires = ("MSK001", "STA003")
    repeated = False

    def not_applicable(self, subject: Subject) -> str | None:
        return without_slots(subject)

    def run(self, subject: Subject) -> Figures:
        specs = specs_of(subject)
        capacity = capacity_for([part.spec for part in slotted_kinds(subject)])
        base = session_for(subject, capacity)
        tally = {"compared": 0}
        strategy = {
            "prompt": st.integers(1, capacity - 6),
            "steps": st.integers(0, 3),
            "trim": st.integers(0, 2),
            "sign": st.sampled_from((-1, 1)),
        }
        rings = rings_of(specs)
        always = [
            {"prompt": ring, "steps": steps, "trim": 0, "sign": 1} for ring in rings for steps in (0, 1)
        ]
        require_always(
            subject, strategy, partial(self._example, subject, base, specs, tally), always=always, share=2
        )
        return tally

    @staticmethod
    def _example(
        subject: Subject,
        base: CompiledDecodeSession,
        specs: list[PartSpec],
        tally: dict[str, int],
        prompt: int,
        steps: int,
        trim: int,
        sign: int,
    ) -> None:
        session, token = _at(subject, base, prompt, steps)
        require_finite(session.state)
        session.trim(min(trim, session.position - 1))
        where, position = f"prompt {prompt}, {steps} steps, trim {trim}", session.position
        parts = parts_of(session.caches, specs)
        hidden = {part.name: _hidden(part, position) for part in parts if part.slotted}
        changed = poisoned(session, parts, sign * POISON, hidden)
        for call, feed in (("step", _step), ("chunk of 3", _chunk)):
            got, want = feed(changed.copy(), token), feed(session.copy(), token)
            tally["compared"] += 1
            if not _unmoved(subject).accepts(got, want):
                raise CheckFailed(
                    f"poison in slots that hold nothing for position {position} moved the logits of a {call} by "
                    f"{largest_difference(got, want):.3g} ({where})",
                    where=where,
                )


def _unmoved(subject: Subject) -> Tolerance:
    """Return what poison may move: nothing on the CPU, where equal graphs give equal bits.

    Elsewhere a kernel may be chosen by where its operands lie in memory. The poison is 10,000 times a usual number, so
    that what a slot adds shows far above any rounding.
    """
    return Tolerance(0.0, "exact") if backend() == "cpu" else subject.tolerance


class CapacityIndependent(Check):
    """The result does not depend on the capacity.

    What it does:
        Runs the same tokens in sessions of several capacities and compares the logits; a ring among them in a capacity
        that it fills and never turns in.

    Why:
        A model that takes a position from the length of the key buffer sees the capacity instead. The model's own
        caches never show that: there the two are equal.

    Example:
        logits differ at step 1, capacity 64 against 29

    How to fix:
        Take positions from the cache, never from `keys.shape[2]`.

    Sources:
        mlx_lm/models/afm7.py and phi3small.py (position from the key length)
    """

    code = "MSK003"
    tier = "numeric"
    requires = ("PAR001", "STA002")
    repeated = False

    def run(self, subject: Subject) -> Figures:
        rings = rings_of(specs_of(subject))
        capacities = [CAPACITY, 64, 101, *rings]
        bases = [session_for(subject, capacity) for capacity in capacities]
        comparer = Comparer(subject.tolerance)
        strategy = {"prompt": st.integers(1, CAPACITY - 6), "stream": st.integers(100, 10_000)}
        always = [{"prompt": ring - 3, "stream": 100} for ring in rings if 3 < ring <= CAPACITY - 3]
        require_always(
            subject, strategy, partial(self._example, subject, bases, comparer), always=always, share=3
        )
        return {**comparer.figures(), "capacities": capacities}

    @staticmethod
    def _example(
        subject: Subject, bases: list[CompiledDecodeSession], comparer: Comparer, prompt: int, stream: int
    ) -> None:
        tokens = teacher_tokens(subject, prompt + 3, stream=stream)
        first, *others = (base.copy() for base in bases if base.capacity >= len(tokens))
        first.prefill([tokens[:prompt]])
        wanted = [first.step([token]) for token in tokens[prompt:]]
        for other in others:
            other.prefill([tokens[:prompt]])
            for step, (token, want) in enumerate(zip(tokens[prompt:], wanted, strict=True), start=1):
                where = f"step {step} after a prompt of {prompt}, capacity {other.capacity} against {first.capacity}"
                with during(Scenario(prompt, 3, other.capacity, stream=stream, dtype=subject.dtype)):
                    comparer.check(other.step([token]), want, where)


def require_finite(state: State) -> None:
    """Require that every slot of every buffer is finite.

    Raises:
        CheckFailed: names the cache.
    """
    finite = [[mx.all(mx.isfinite(array)) for array in arrays] for arrays in state]
    mx.eval(finite)  # at once: each evaluation waits for the device
    for index, flags in enumerate(finite):
        if not all(bool(flag.item()) for flag in flags):
            raise CheckFailed(
                f"caches[{index}] holds NaN or infinity: masked slots must be finite",
                where=f"caches[{index}]",
            )


def _at(
    subject: Subject, base: CompiledDecodeSession, prompt: int, steps: int
) -> tuple[CompiledDecodeSession, int]:
    """Return a session after a prompt and compiled steps, and the token to feed next."""
    tokens = teacher_tokens(subject, prompt + steps + 1, stream=9)
    session = base.copy()
    session.prefill([tokens[:prompt]])
    for token in tokens[prompt:-1]:
        session.step([token])
    return session, tokens[-1]


def _hidden(part: Part, position: int) -> list[int]:
    """Return the slots that hold nothing for a token at `position` or later: whatever it sees of them is a fault.

    The slot that it is written to is among them, since what was there is overwritten before anybody reads it.
    """
    slots = part.cache.slots
    seen = {part.spec.slot(time, slots) for time in part.spec.visible(position) if time < position}
    return [slot for slot in range(slots) if slot not in seen]


def _step(session: CompiledDecodeSession, token: int) -> mx.array:
    return session.step([token])


def _chunk(session: CompiledDecodeSession, token: int) -> mx.array:
    return session.extend([[token] * 3])
