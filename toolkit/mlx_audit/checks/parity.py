"""Does compiled decoding give what eager decoding gives?"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import mlx.core as mx

from mlx_audit.checks.base import Check, CheckFailed, Figures, NotRun
from mlx_audit.checks.reference import NoReference, error_against, float64_logits
from mlx_audit.checks.runs import (
    PROMPT,
    Comparer,
    Eager,
    eager_logits,
    require_traces,
    session_for,
    teacher_tokens,
    windows,
)
from mlx_audit.checks.scenario import Scenario, during
from mlx_audit.checks.stand_ins import stand_ins_for
from mlx_audit.checks.subject import Subject
from mlx_audit.checks.tolerance import error_allowed, relative_difference
from mlx_audit.errors import describe
from mlx_audit.evidence.environment import backend

_CHUNKS = (1, 2, 3, 5, PROMPT)
_SHORT = 3
"""Steps in float64."""

_WIDEST = 128
"""Tokens of the widest window that is turned here."""

_MOST_DIFFERENCES = 64
"""Numbers that the figures give of the steps."""


class TeacherForcedLogits(Check):
    """Logits equal eager decoding at each teacher-forced step.

    What it does:
        Feeds the same random tokens to a compiled session and to eager decoding with the model's own caches and
        compares the logits at each step; for prompts of 1, 13 and all but one of the capacity, and, for each window or
        chunk W of the caches, for prompts of W−1, W, W+1 and 2W+1, until the ring has turned at least twice more. In
        bfloat16 and float16 there is one run each. The step must be traced exactly once, before, at and after the
        turn.
        `minimum_tolerance` is the smallest relative tolerance that would have passed. `float64` gives the error of
        eager and of compiled float32 against eager float64 on the same weights, relative to the largest logit; that of
        compiled decoding may be a small multiple of eager's. Another most likely token fails, but for a tie.
        `differences` is the largest one at each step in float32, over all prompts, relative to the largest logit;
        `allowed` is the bound. Of more than 64 steps, each number is the largest of `steps_a_difference` steps.
        A dtype that eager decoding refuses here says so; where only `gather_mm` refuses it, both sides run with a
        stand-in, which is named.

    Why:
        Random tokens are forced on both sides because greedy tokens of a tiny model hardly vary: with them a frozen
        position would go unseen. The first replay of a frozen write looks right, so many steps are compared. A ring
        that is off by one shows only where it turns.

    Example:
        logits differ at step 2 after a prompt of 13: logits[17] is 1.25, wanted 1.5

    How to fix:
        The trace checks (TRC) usually name the line. Where they pass, look at what differs between the caches: mask,
        position, or dtype.

    Sources:
        ml-explore/mlx-swift-lm#406, #550
    """

    code = "PAR001"
    tier = "numeric"
    requires = ("ENV001", "TRC001", "TRC005")

    def run(self, subject: Subject) -> Figures:
        figures: Figures = {subject.dtype: _in_dtype(subject)}
        if subject.dtype != "float32" and isinstance(figures[subject.dtype], str):
            raise NotRun(f"{subject.dtype} {figures[subject.dtype]}")
        if subject.main:
            for dtype in subject.amounts.dtypes:
                if dtype != subject.dtype:
                    figures[dtype] = _in_dtype(replace(subject, dtype=dtype))
            figures["float64"] = _against_float64(replace(subject, dtype="float32"))
        return figures


class _StepComparer(Comparer):
    """Also remembers the largest relative difference at each step, over all runs; its figures give them in float32."""

    def __init__(self, subject: Subject) -> None:
        super().__init__(subject.tolerance)
        self._shown = subject.dtype == "float32"
        self._by_step: list[float] = []

    def check_step(self, step: int, got: mx.array, want: mx.array, where: str) -> None:
        """Compare the logits of a step, counted from 1, as `check` does; the one that fails is remembered too."""
        self._by_step += [0.0] * (step - len(self._by_step))
        self._by_step[step - 1] = max(self._by_step[step - 1], relative_difference(got, want))
        self.check(got, want, where)

    def figures(self) -> Figures:
        if not self._shown:
            return super().figures()
        together = max(1, -(-len(self._by_step) // _MOST_DIFFERENCES))
        starts = range(0, len(self._by_step), together)
        largest = [max(self._by_step[start : start + together]) for start in starts]
        return {
            **super().figures(),
            "differences": [float(f"{difference:.3g}") for difference in largest],
            "steps_a_difference": together,
            "allowed": self.tolerance.relative,
        }


def _in_dtype(subject: Subject) -> Figures | str:
    """Compare in the subject's dtype; a shorter one than float32 may be impossible here, and then why is returned."""
    comparer = _StepComparer(subject)
    if subject.dtype == "float32":
        for runs in _plans(subject):
            _compare(subject, runs, comparer)
        return {**comparer.figures(), "windows": windows(subject.model)}
    with stand_ins_for(subject.dtype) as used:
        refusal = _eager_refusal(subject)
        if refusal is not None:
            return f"not run: {refusal}"
        _compare(subject, [(PROMPT, subject.amounts.steps)], comparer)
    return {**comparer.figures(), **({"stand_in": ", ".join(sorted(used))} if used else {})}


def _plans(subject: Subject) -> Iterator[list[tuple[int, int]]]:
    """Yield prompts and numbers of steps; those of one list share a session's capacity, and its one trace."""
    steps = subject.amounts.steps
    yield [(PROMPT, steps)]
    if not subject.main:
        return
    yield [(1, 6)]
    yield [(PROMPT + steps - 1, 1)]
    for window in windows(subject.model):
        if window > _WIDEST:
            raise NotRun(
                f"a window of {window} tokens is too wide to turn it several times: give the tiny configuration one of "
                f"at most {_WIDEST}"
            )
        short = [(prompt, 2 * window + 1) for prompt in (window - 1, window, window + 1) if prompt]
        yield [*short, (2 * window + 1, 3 * window + 1)]


def _compare(subject: Subject, runs: Sequence[tuple[int, int]], comparer: _StepComparer) -> None:
    base = session_for(subject, max(prompt + count for prompt, count in runs))
    positions: list[int] = []
    for prompt, count in runs:
        tokens = teacher_tokens(subject, prompt + count)
        wanted = eager_logits(subject.model, tokens[:prompt], tokens[prompt:])
        session = base.copy()
        label = f"after a prompt of {prompt}, {subject.dtype}"
        with during(Scenario(prompt, count, base.capacity, dtype=subject.dtype)):
            comparer.check(session.prefill([tokens[:prompt]]), wanted[0], f"prefill {label}")
            for step, (token, want) in enumerate(zip(tokens[prompt:], wanted[1:], strict=True), start=1):
                comparer.check_step(step, session.step([token]), want, f"step {step} {label}")
        positions += range(prompt + 1, prompt + count + 1)
        require_traces(session, positions, comparer.figures())


def _eager_refusal(subject: Subject) -> str | None:
    """Return why mlx-lm's own eager decoding gives nothing to compare with in this dtype, or None."""
    tokens = teacher_tokens(subject, PROMPT + 1)
    try:
        logits = eager_logits(subject.model, tokens[:PROMPT], tokens[PROMPT:])
    except Exception as error:
        return f"eager decoding raises {describe(error)}"
    finite = all(bool(mx.all(mx.isfinite(array) | (array == -mx.inf)).item()) for array in logits)
    return None if finite else "eager logits are not finite"


def _against_float64(subject: Subject) -> Figures:
    if backend() != "cpu":
        return {"not_computed": "MLX computes in float64 on the CPU only"}
    tokens = teacher_tokens(subject, PROMPT + _SHORT, stream=20)
    prompt, forced = tokens[:PROMPT], tokens[PROMPT:]
    try:
        wanted = float64_logits(subject, prompt, forced)
    except NoReference as reason:
        return {"not_computed": str(reason)}
    session = session_for(subject, len(tokens))
    compiled = [session.prefill([prompt]), *(session.step([token]) for token in forced)]
    errors = [
        max(error_against(got, want) for got, want in zip(logits, wanted, strict=True))
        for logits in (eager_logits(subject.model, prompt, forced), compiled)
    ]
    allowed = error_allowed(subject.tolerance.name, errors[0])
    figures = {"eager_error": errors[0], "compiled_error": errors[1], "allowed_error": allowed}
    if errors[1] > allowed:
        raise CheckFailed(
            f"compiled float32 is off by {errors[1]:.3g} of the largest logit against eager float64, eager float32 by "
            f"{errors[0]:.3g}; allowed {allowed:.3g} ({subject.tolerance.name})",
            where="the error against float64",
            figures={"float64": figures},
        )
    return {**figures, "ratio": errors[1] / max(errors[0], 1e-30)}


class Continuation(Check):
    """A multi-token continuation equals eager decoding, and adds no trace.

    What it does:
        After a prompt and three compiled steps, feeds four tokens at once through `extend`, takes three more compiled
        steps, and compares the logits after each with eager decoding.

    Why:
        A chat continues with a whole turn. The chunk needs a causal mask at an offset, over slots that a compiled
        step wrote.

    Example:
        logits differ at extend of 4 at position 16

    How to fix:
        Look at `make_mask(N)` for N > 1 and at the position after a chunk.

    Sources:
        mlx_lm/models/base.py create_causal_mask
    """

    code = "PAR003"
    tier = "numeric"
    requires = ("PAR001",)
    repeated = False

    def run(self, subject: Subject) -> Figures:
        tokens = teacher_tokens(subject, PROMPT + 10, stream=2)
        session, eager = session_for(subject, PROMPT + 10), Eager(subject.model)
        comparer = Comparer(subject.tolerance)
        with during(Scenario(PROMPT, 10, stream=2, dtype=subject.dtype)):
            comparer.check(session.prefill([tokens[:PROMPT]]), eager.feed(tokens[:PROMPT]), "prefill")
            at = PROMPT
            for length in (1, 1, 1, 4, 1, 1, 1):
                piece = tokens[at : at + length]
                got = session.extend([piece]) if length > 1 else session.step(piece)
                name = "extend" if length > 1 else "step"
                comparer.check(got, eager.feed(piece), f"{name} of {length} at position {at}")
                at += length
        if session.trace_count != 1:
            raise CheckFailed(f"traced {session.trace_count} times, wanted 1", figures=comparer.figures())
        return {**comparer.figures(), "traces": session.trace_count}


class PrefillChunks(Check):
    """Any chunking of the prompt gives what eager decoding gives with the same chunks.

    What it does:
        Prefills in chunks of 1, 2, 3, 5 and all tokens, natively and then again by `extend` on the fixed-capacity
        caches, and compares the logits of the prompt and of three compiled steps with eager decoding.

    Why:
        Long prompts are read in chunks, and the last one is shorter. An off-by-one at a chunk's edge shows only here.

    Example:
        logits differ at step 1 after extend in chunks of 3

    How to fix:
        Look at the position and the mask of a chunk that starts at a position other than 0.

    Sources:
        mlx_lm/generate.py (prefill_step_size)
    """

    code = "PAR004"
    tier = "numeric"
    requires = ("PAR003", "STA002")
    repeated = False

    def run(self, subject: Subject) -> Figures:
        tokens = teacher_tokens(subject, PROMPT + 3, stream=3)
        prompt, forced = tokens[:PROMPT], tokens[PROMPT:]
        comparer = Comparer(subject.tolerance)
        base = session_for(subject, PROMPT + 3)
        for chunk in _CHUNKS:
            eager = Eager(subject.model)
            wanted = [eager.feed(prompt, chunk=chunk), *(eager.feed([token]) for token in forced)]
            native = session_for(subject, PROMPT + 3, prefill_step_size=chunk)
            with during(Scenario(PROMPT, 3, chunk=chunk, stream=3, dtype=subject.dtype)):
                logits = native.prefill([prompt])
                self._compare(comparer, logits, native, forced, wanted, f"prefill in chunks of {chunk}")
                fixed = base.copy()
                logits = fixed.prefill([prompt[:chunk]])
                for start in range(chunk, PROMPT, chunk):
                    logits = fixed.extend([prompt[start : start + chunk]])
                self._compare(comparer, logits, fixed, forced, wanted, f"extend in chunks of {chunk}")
        return {**comparer.figures(), "chunks": list(_CHUNKS)}

    @staticmethod
    def _compare(comparer, logits, session, forced, wanted, label) -> None:  # type: ignore[no-untyped-def]
        comparer.check(logits, wanted[0], label)
        for step, (token, want) in enumerate(zip(forced, wanted[1:], strict=True), start=1):
            comparer.check(session.step([token]), want, f"step {step} after {label}")
