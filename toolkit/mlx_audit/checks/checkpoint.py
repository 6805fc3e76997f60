"""The same on the real weights."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from mlx_audit.caches import host_int
from mlx_audit.checks.base import Check, CheckFailed, Figures, NotRun
from mlx_audit.checks.real_text import RealText
from mlx_audit.checks.runs import PROMPT, Comparer, Eager
from mlx_audit.checks.subject import Subject
from mlx_audit.checks.tolerance import tolerance_for
from mlx_audit.decode import CompiledDecodeSession
from mlx_audit.evidence.environment import backend
from mlx_audit.models.checkpoint import text_of
from mlx_audit.tracing.constants import dtype_name

_REPLY = 16
"""Tokens of a reply, and of what follows a second turn."""


class _CheckpointCheck(Check):
    """A check that needs real weights."""

    def not_applicable(self, subject: Subject) -> str | None:
        return "no checkpoint was given" if subject.checkpoint is None else None


class CheckpointLogits(_CheckpointCheck):
    """With the real weights, logits equal eager decoding at each teacher-forced step.

    What it does:
        Loads the checkpoint and compares 64 compiled steps, forced along a paragraph of English, with eager decoding,
        within the class of the variant and the dtype of the logits. Without a tokenizer: 16 steps on random ids.

    Why:
        Quantized and half-precision weights take other kernels than tiny float32 ones.

    Example:
        logits differ at step 3

    How to fix:
        See PAR001. If only quantized weights differ, compare the kernels that eager and compiled decoding use.

    Sources:
        ml-explore/mlx-swift-lm#550 (its opt-in checkpoint test)
    """

    code = "CKP001"
    tier = "checkpoint"
    requires = ("ENV001",)

    def run(self, subject: Subject) -> Figures:
        real = RealText(subject)
        tokens = real.tokens(PROMPT + real.steps)
        session = CompiledDecodeSession(real.model, len(tokens), evidence="ignore")
        eager = Eager(real.model)
        want = eager.feed(tokens[:PROMPT])
        comparer = _comparer(subject, want)
        comparer.check(session.prefill([tokens[:PROMPT]]), want, "prefill")
        for step, token in enumerate(tokens[PROMPT:], start=1):
            comparer.check(session.step([token]), eager.feed([token]), f"step {step}")
        if session.trace_count != 1:
            raise CheckFailed(f"traced {session.trace_count} times, wanted 1", figures=comparer.figures())
        return {
            **comparer.figures(),
            "dtype": dtype_name(want.dtype),
            "steps": real.steps,
            "traces": session.trace_count,
        }


class CheckpointTokens(_CheckpointCheck):
    """With the real weights, greedy tokens equal eager decoding.

    What it does:
        Asks a question and generates 64 tokens greedily, beyond any stop token, compiled and eagerly, and compares
        them. Without a tokenizer: 16 tokens after random ids.

    Why:
        This is what a user of the checkpoint sees.

    Example:
        token 5 is 17, wanted 42

    How to fix:
        See CKP001.

    Sources:
        mlx_lm/generate.py generate_step
    """

    code = "CKP002"
    tier = "checkpoint"
    requires = ("CKP001",)

    def run(self, subject: Subject) -> Figures:
        real = RealText(subject)
        prompt = real.prompt()
        eager, wanted = Eager(real.model), []
        logits = eager.feed(prompt)
        for _ in range(real.steps):
            wanted.append(host_int(mx.argmax(logits, axis=-1)))
            logits = eager.feed([wanted[-1]])
        session = CompiledDecodeSession(real.model, len(prompt) + real.steps, evidence="ignore")
        got = list(session.generate(prompt, max_new_tokens=real.steps))
        _require_equal(got, wanted)
        return {"tokens": real.steps, "distinct_tokens": len(set(got)), **real.says(got)}


class CheckpointContinuation(_CheckpointCheck):
    """With the real weights, a second chat turn equals eager decoding.

    What it does:
        Asks a question, takes the greedy reply, feeds a second question in one call, and goes on greedily; logits are
        compared at each step, and after each of the two calls, with eager decoding of the same chunks.

    Why:
        Every chat does this, and a prompt of many tokens takes other kernels than single tokens do.

    Example:
        logits differ at the second turn

    How to fix:
        See PAR003.

    Sources:
        ml-explore/mlx-swift-lm#550 (continued prefill)
    """

    code = "CKP003"
    tier = "checkpoint"
    requires = ("CKP001",)

    def run(self, subject: Subject) -> Figures:
        real = RealText(subject)
        prompt = real.prompt()
        dialogue = _Dialogue(subject, real, len(prompt))
        reply = dialogue.say(prompt, "the first turn")
        turn = real.second_turn([*prompt, *reply], reply)
        second = dialogue.say(turn, "the second turn")
        said = real.says(second)
        return {**dialogue.comparer.figures(), "turn": len(turn), **said}


class CheckpointStop(_CheckpointCheck):
    """With the real weights, generation stops where mlx-lm's own does, with the same text.

    What it does:
        Generates at most 64 tokens with the tokenizer's stop tokens, by a session and by mlx-lm's `stream_generate`,
        and compares tokens and text. Where the model did not stop by itself, a token of its own answer is made a stop
        token.

    Why:
        Whether the stop token belongs to the answer is a convention; a difference of one token shows in every reply.

    Example:
        9 tokens, wanted 8

    How to fix:
        `session.generate` must not yield the stop token, nor count it.

    Sources:
        mlx_lm/generate.py stream_generate
    """

    code = "CKP004"
    tier = "checkpoint"
    requires = ("CKP002",)

    def not_applicable(self, subject: Subject) -> str | None:
        if subject.checkpoint is not None and subject.real.tokenizer is None:
            return "the checkpoint has no tokenizer"
        return super().not_applicable(subject)

    def run(self, subject: Subject) -> Figures:
        real = RealText(subject)
        tokenizer = real.tokenizer
        assert tokenizer is not None, "not applicable without one"
        own = set(tokenizer.eos_token_ids)
        try:
            tokens, ended = _both(real)
            if not ended:
                tokenizer.eos_token_ids = own | {tokens[len(tokens) // 2]}
                tokens, ended = _both(real)
        finally:
            tokenizer.eos_token_ids = own
        if not ended:
            raise NotRun("mlx-lm did not stop, though its own token was made a stop token")
        return {"tokens": len(tokens), **real.says(tokens)}


class _Dialogue:
    """Compiled and eager decoding side by side."""

    def __init__(self, subject: Subject, real: RealText, prompt: int) -> None:
        self.real = real
        self.subject = subject
        self.session = CompiledDecodeSession(real.model, 4 * prompt + 4 * _REPLY + 256, evidence="ignore")
        self.eager = Eager(real.model)
        self.comparer: Comparer

    def say(self, tokens: list[int], name: str) -> list[int]:
        """Feed tokens in one call, and return the greedy reply, up to a stop token."""
        stop = self.real.tokenizer.eos_token_ids if self.real.tokenizer is not None else ()
        first = not self.session.position
        got = self.session.prefill([tokens]) if first else self.session.extend([tokens])
        want = self.eager.feed(tokens)
        if first:
            self.comparer = _comparer(self.subject, want)
        self.comparer.check(got, want, name)
        reply: list[int] = []
        while len(reply) < _REPLY and (token := host_int(mx.argmax(want, axis=-1))) not in stop:
            reply.append(token)
            got, want = self.session.step([token]), self.eager.feed([token])
            self.comparer.check(got, want, f"step {len(reply)} after {name}")
        return reply


def _comparer(subject: Subject, like: mx.array) -> Comparer:
    return Comparer(tolerance_for(subject.exactness_class, dtype_name(like.dtype), backend()))


def _require_equal(got: Sequence[int], wanted: Sequence[int]) -> None:
    for index, (token, want) in enumerate(zip(got, wanted, strict=False)):
        if token != want:
            raise CheckFailed(f"token {index} is {token}, wanted {want}", where=f"token {index}")
    if len(got) != len(wanted):
        raise CheckFailed(
            f"{len(got)} tokens, wanted {len(wanted)}", where=f"token {min(len(got), len(wanted))}"
        )


def _both(real: RealText) -> tuple[list[int], bool]:
    """Return the tokens that a session and mlx-lm agree on, and whether a stop token ended them."""
    from mlx_lm.generate import stream_generate

    assert real.tokenizer is not None
    prompt = real.prompt()
    responses = list(stream_generate(real.model, real.tokenizer, prompt, max_tokens=real.steps))
    ended = responses[-1].finish_reason == "stop"
    wanted = [response.token for response in (responses[:-1] if ended else responses)]
    session = CompiledDecodeSession(real.model, len(prompt) + real.steps, evidence="ignore")
    got = list(session.generate(prompt, real.steps, stop_tokens=real.tokenizer.eos_token_ids))
    _require_equal(got, wanted)
    text, want = text_of(real.tokenizer, got), "".join(response.text for response in responses)
    if text != want:
        raise CheckFailed(f"the text is {text!r}, wanted {want!r}")
    return wanted, ended
