"""Does compiled decoding give what eager decoding gives?"""

from __future__ import annotations

from dataclasses import replace

import mlx.core as mx

from mlx_audit.caches import host_int
from mlx_audit.checks.base import Check, CheckFailed, Figures
from mlx_audit.checks.runs import PROMPT, Comparer, Eager, eager_logits, session_for, teacher_tokens
from mlx_audit.checks.subject import Subject

_CHUNKS = (1, 2, 3, 5, PROMPT)


class TeacherForcedLogits(Check):
    """Logits equal eager decoding at each teacher-forced step.

    What it does:
        Feeds the same random tokens to a compiled session and to eager decoding with the model's own caches and
        compares the logits at each step; for prompts of 1, 13 and all but one of the capacity; in float32, bfloat16
        and float16 on the main configuration. The step must be traced exactly once in each session.

    Why:
        Random tokens are forced on both sides because greedy tokens of a tiny model hardly vary: with them a frozen
        position would go unseen. The first replay of a frozen write looks right, so many steps are compared.

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
        dtypes = [subject.dtype]
        if subject.main:
            dtypes += [dtype for dtype in ("float32", "bfloat16", "float16") if dtype != subject.dtype]
        figures: Figures = {}
        for dtype in dtypes:
            figures[dtype] = _one_dtype(subject, dtype)
        return figures


def _one_dtype(subject: Subject, dtype: str) -> Figures:
    typed = subject if dtype == subject.dtype else replace(subject, dtype=dtype)
    steps = subject.amounts.steps
    comparer = Comparer(typed.tolerance)
    runs = [(PROMPT, steps)] + ([(1, 6), (PROMPT + steps - 1, 1)] if subject.main else [])
    for prompt, count in runs:
        tokens = teacher_tokens(subject, prompt + count)
        wanted = eager_logits(typed.model, tokens[:prompt], tokens[prompt:])
        session = session_for(typed, prompt + count)
        label = f"after a prompt of {prompt}, {dtype}"
        comparer.check(session.prefill([tokens[:prompt]]), wanted[0], f"prefill {label}")
        for step, (token, want) in enumerate(zip(tokens[prompt:], wanted[1:], strict=True), start=1):
            comparer.check(session.step([token]), want, f"step {step} {label}")
        if session.trace_count != 1:
            raise CheckFailed(
                f"traced {session.trace_count} times in {count} steps, wanted 1: "
                + "; ".join(session.retrace_reasons[:2]),
                figures=comparer.figures(),
            )
    return comparer.figures()


class GreedyTokens(Check):
    """Greedy tokens equal eager decoding.

    What it does:
        Generates greedily with a compiled session and eagerly, from the same prompt, and compares the tokens. The
        tiny model's matrices are scaled so that its greedy tokens vary.

    Why:
        Tokens are what a user sees. This is the weakest parity check: it only adds to the comparison of logits.

    Example:
        token 5 is 17, wanted 42

    How to fix:
        See PAR001.

    Sources:
        mlx_lm/generate.py generate_step
    """

    code = "PAR002"
    tier = "numeric"
    requires = ("PAR001",)
    repeated = False

    def run(self, subject: Subject) -> Figures:
        count = subject.amounts.steps
        prompt = teacher_tokens(subject, PROMPT, stream=1)
        eager = Eager(subject.model)
        logits, wanted = eager.feed(prompt), []
        for _ in range(count):
            wanted.append(host_int(mx.argmax(logits, axis=-1)))
            logits = eager.feed([wanted[-1]])
        got = list(session_for(subject, PROMPT + count).generate(prompt, max_new_tokens=count))
        for index, (token, want) in enumerate(zip(got, wanted, strict=True)):
            if token != want:
                raise CheckFailed(f"token {index} is {token}, wanted {want}", where=f"token {index}")
        return {"tokens": count, "distinct_tokens": len(set(got))}


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
        comparer.check(session.prefill([tokens[:PROMPT]]), eager.feed(tokens[:PROMPT]), "prefill")
        at = PROMPT
        for length in (1, 1, 1, 4, 1, 1, 1):
            piece = tokens[at : at + length]
            got = session.extend([piece]) if length > 1 else session.step(piece)
            comparer.check(
                got, eager.feed(piece), f"{'extend' if length > 1 else 'step'} of {length} at position {at}"
            )
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
            self._compare(
                comparer, native.prefill([prompt]), native, forced, wanted, f"prefill in chunks of {chunk}"
            )
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
