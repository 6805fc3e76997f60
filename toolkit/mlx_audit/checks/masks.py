"""Who sees whom: properties of masks and slots, drawn by Hypothesis inside the run."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from mlx_audit.checks.base import Check, CheckFailed, Figures
from mlx_audit.checks.runs import Comparer, session_for, teacher_tokens
from mlx_audit.checks.subject import Subject
from mlx_audit.checks.tolerance import largest_difference
from mlx_audit.decode import CompiledDecodeSession, State

_CAPACITY = 29
_POISON = 1e4
"""Large and finite: a masked slot is multiplied by zero, and zero times NaN is NaN."""


class AttendedTokens(Check):
    """Each token attends to exactly the right tokens.

    What it does:
        For drawn prompt lengths and numbers of steps: the mask of the next tokens shows exactly the causal set (and
        within a window, where asked for), with no row all false; and a changed value in a slot changes the next logits
        if and only if that slot holds an earlier token.

    Why:
        An edge off by one lets a token see the future, or forget the nearest past. A row that is all false gives the
        mean of all values, not an error.

    Example:
        at position 7 the mask of query 0 shows slots [0, …, 8], wanted [0, …, 7]

    How to fix:
        Look at `make_mask`: query position ≥ key position, and query position < key position + window.

    Sources:
        mlx_lm/models/base.py create_causal_mask; ml-explore/mlx-lm#390 (a window one key too wide)
    """

    code = "MSK001"
    tier = "numeric"
    requires = ("PAR003", "STA002")
    repeated = False

    def run(self, subject: Subject) -> Figures:
        base = session_for(subject, _CAPACITY)
        tally = {"masks": 0, "attended": 0, "hidden": 0}
        held = st.integers(1, _CAPACITY - 6)
        strategy = {"prompt": held, "steps": st.integers(0, 2), "chunk": st.integers(1, 3), "slot": _slots()}
        _property(subject, strategy, partial(self._example, subject, base, tally))
        return tally

    @staticmethod
    def _example(
        subject: Subject,
        base: CompiledDecodeSession,
        tally: dict[str, int],
        prompt: int,
        steps: int,
        chunk: int,
        slot: int,
    ) -> None:
        session, token = _at(subject, base, prompt, steps)
        position = session.position
        for cache in session.caches:
            for window in (None, 3):
                _require_causal(cache, chunk, position, window)
                tally["masks"] += 1
        changed = session.with_state(_poisoned(session.state, [slot], _POISON))
        difference = largest_difference(changed.step([token]), session.step([token]))
        attended = slot < position
        tally["attended" if attended else "hidden"] += 1
        if (difference > 0) != attended:
            raise CheckFailed(
                f"slot {slot} {'is ignored' if attended else 'is seen'} by the token at position {position} "
                f"(prompt {prompt}, {steps} steps): changing it moved the logits by {difference:.3g}",
                where=f"position {position}, slot {slot}",
            )


class UnwrittenSlotsHidden(Check):
    """Poison in slots that hold no token changes nothing.

    What it does:
        Fills every slot beyond the position with large finite numbers and compares a compiled step and a chunk of
        three with the clean run; again after a trim, where the stale rows of forgotten tokens stay in place. All slots
        of the clean state must be finite.

    Why:
        A masked slot is still multiplied by zero, so a NaN left in one spreads: masked slots must be finite.

    Example:
        poison in slots 6…28 moved the logits by 0.4; caches[0] holds NaN: masked slots must be finite

    How to fix:
        Apply the mask in decode too; allocate buffers with zeros.

    Sources:
        vllm-project/vllm#43961
    """

    code = "MSK002"
    tier = "numeric"
    requires = ("MSK001", "STA003")
    repeated = False

    def run(self, subject: Subject) -> Figures:
        base = session_for(subject, _CAPACITY)
        tally = {"compared": 0}
        strategy = {
            "prompt": st.integers(1, _CAPACITY - 6),
            "steps": st.integers(0, 3),
            "trim": st.integers(0, 2),
            "sign": st.sampled_from((-1, 1)),
        }
        _property(subject, strategy, partial(self._example, subject, base, tally))
        return tally

    @staticmethod
    def _example(
        subject: Subject,
        base: CompiledDecodeSession,
        tally: dict[str, int],
        prompt: int,
        steps: int,
        trim: int,
        sign: int,
    ) -> None:
        session, token = _at(subject, base, prompt, steps)
        require_finite(session.state)
        session.trim(min(trim, session.position - 1))
        empty = list(range(session.position, _CAPACITY))
        where = f"prompt {prompt}, {steps} steps, trim {trim}"
        poisoned = session.with_state(_poisoned(session.state, empty, sign * _POISON))
        for call, feed in (("step", _step), ("chunk of 3", _chunk)):
            difference = largest_difference(feed(poisoned.copy(), token), feed(session.copy(), token))
            tally["compared"] += 1
            if difference != 0:
                raise CheckFailed(
                    f"poison in slots {empty[0]}…{empty[-1]} moved the logits of a {call} by {difference:.3g} "
                    f"({where})",
                    where=where,
                )


class CapacityIndependent(Check):
    """The result does not depend on the capacity.

    What it does:
        Runs the same tokens in sessions of several capacities and compares the logits.

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

    _CAPACITIES = (_CAPACITY, 64, 101)

    def run(self, subject: Subject) -> Figures:
        bases = [session_for(subject, capacity) for capacity in self._CAPACITIES]
        comparer = Comparer(subject.tolerance)
        strategy = {"prompt": st.integers(1, _CAPACITY - 6), "stream": st.integers(100, 10_000)}
        _property(subject, strategy, partial(self._example, subject, bases, comparer), share=3)
        return {**comparer.figures(), "capacities": list(self._CAPACITIES)}

    @staticmethod
    def _example(
        subject: Subject, bases: list[CompiledDecodeSession], comparer: Comparer, prompt: int, stream: int
    ) -> None:
        tokens = teacher_tokens(subject, prompt + 3, stream=stream)
        first, *others = (base.copy() for base in bases)
        first.prefill([tokens[:prompt]])
        wanted = [first.step([token]) for token in tokens[prompt:]]
        for other in others:
            other.prefill([tokens[:prompt]])
            for step, (token, want) in enumerate(zip(tokens[prompt:], wanted, strict=True), start=1):
                where = f"step {step} after a prompt of {prompt}, capacity {other.capacity} against {first.capacity}"
                comparer.check(other.step([token]), want, where)


def require_finite(state: State) -> None:
    """Require that every slot of every buffer is finite.

    Raises:
        CheckFailed: names the cache.
    """
    for index, arrays in enumerate(state):
        for array in arrays:
            if mx.issubdtype(array.dtype, mx.floating) and not bool(mx.all(mx.isfinite(array)).item()):
                raise CheckFailed(
                    f"caches[{index}] holds NaN or infinity: masked slots must be finite",
                    where=f"caches[{index}]",
                )


def _property(
    subject: Subject, strategy: dict[str, Any], example: Callable[..., None], *, share: int = 1
) -> None:
    """Run `example` for drawn arguments; `share` divides the profile's number of examples."""
    amounts = subject.amounts

    def drawn(**arguments: Any) -> None:
        example(**arguments)

    run = given(**strategy)(drawn)
    limits = settings(
        max_examples=max(2, amounts.examples // share),
        derandomize=amounts.derandomize,
        database=None,
        deadline=None,
        phases=(Phase.explicit, Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
        report_multiple_bugs=False,
    )
    try:
        (limits(run) if amounts.derandomize else seed(subject.seed)(limits(run)))()
    except BaseExceptionGroup as group:  # a failure that an equal example does not show again
        raise group.exceptions[0] from None


def _slots() -> st.SearchStrategy[int]:
    return st.integers(0, _CAPACITY - 1)


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


def _poisoned(state: State, slots: list[int], value: float) -> State:
    """Return a state in which some slots of every buffer hold `value`."""
    result = []
    for arrays in state:
        changed = []
        for array in arrays:
            if array.ndim == 4 and slots:
                array = mx.array(array)
                array[:, :, mx.array(slots), :] = value
            changed.append(array)
        result.append(changed)
    return result


def _require_causal(cache: Any, queries: int, position: int, window: int | None) -> None:
    mask = np.array(cache.make_mask(queries, window_size=window))
    shape = (1, 1, queries, cache.capacity)
    if mask.shape != shape or mask.dtype != np.bool_:
        raise CheckFailed(f"the mask is {mask.dtype}{list(mask.shape)}, wanted bool{list(shape)}")
    for query in range(queries):
        last = position + query
        want = list(range(max(0, last - window + 1) if window else 0, last + 1))
        got = np.flatnonzero(mask[0, 0, query]).tolist()
        if got != want:
            raise CheckFailed(
                f"at position {position} the mask of query {query} (window {window}) shows slots {got}, wanted {want}",
                where=f"position {position}, query {query}",
            )


def _step(session: CompiledDecodeSession, token: int) -> mx.array:
    return session.step([token])


def _chunk(session: CompiledDecodeSession, token: int) -> mx.array:
    return session.extend([[token] * 3])
