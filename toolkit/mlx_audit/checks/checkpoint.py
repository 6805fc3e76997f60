"""The same on the real weights."""

from __future__ import annotations

from functools import cached_property

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlx_audit.caches import host_int
from mlx_audit.checks.base import Check, CheckFailed, Figures
from mlx_audit.checks.runs import PROMPT, Comparer, Eager
from mlx_audit.checks.subject import Subject
from mlx_audit.checks.tolerance import tolerance_for
from mlx_audit.decode import CompiledDecodeSession
from mlx_audit.evidence.environment import backend
from mlx_audit.tracing.constants import dtype_name

_STEPS = 16


class RealWeights:
    """A checkpoint's model and some prompt tokens, loaded when first needed."""

    def __init__(self, subject: Subject) -> None:
        self._subject = subject

    @cached_property
    def model(self) -> nn.Module:
        """The model with its weights, by mlx-lm's own loader; no code of the checkpoint's is run."""
        from mlx_lm.utils import load_model

        assert self._subject.checkpoint is not None
        model: nn.Module = load_model(self._subject.checkpoint)[0]
        return model

    def tokens(self, count: int) -> list[int]:
        """Return random ids within the vocabulary, from the subject's seed."""
        logits = self.model(mx.zeros((1, 1), mx.int32))
        generator = np.random.default_rng([self._subject.seed, 17])
        return [int(token) for token in generator.integers(0, logits.shape[-1], count)]


class CheckpointLogits(Check):
    """With the real weights, logits equal eager decoding at each teacher-forced step.

    What it does:
        Loads the checkpoint with mlx-lm's loader and compares 16 teacher-forced compiled steps with eager decoding,
        within the class of the variant and the dtype of the logits.

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

    def not_applicable(self, subject: Subject) -> str | None:
        return "no checkpoint was given" if subject.checkpoint is None else None

    def run(self, subject: Subject) -> Figures:
        real = RealWeights(subject)
        tokens = real.tokens(PROMPT + _STEPS)
        session = CompiledDecodeSession(real.model, PROMPT + _STEPS, evidence="ignore")
        eager = Eager(real.model)
        want = eager.feed(tokens[:PROMPT])
        dtype = dtype_name(want.dtype)
        comparer = Comparer(tolerance_for(subject.exactness, dtype, backend()))
        comparer.check(session.prefill([tokens[:PROMPT]]), want, "prefill")
        for step, token in enumerate(tokens[PROMPT:], start=1):
            comparer.check(session.step([token]), eager.feed([token]), f"step {step}")
        if session.trace_count != 1:
            raise CheckFailed(f"traced {session.trace_count} times, wanted 1", figures=comparer.figures())
        return {**comparer.figures(), "dtype": dtype, "steps": _STEPS, "traces": session.trace_count}


class CheckpointTokens(Check):
    """With the real weights, greedy tokens equal eager decoding.

    What it does:
        Generates 16 tokens greedily, compiled and eagerly, from the same prompt, and compares them.

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

    def not_applicable(self, subject: Subject) -> str | None:
        return "no checkpoint was given" if subject.checkpoint is None else None

    def run(self, subject: Subject) -> Figures:
        real = RealWeights(subject)
        prompt = real.tokens(PROMPT)
        eager, wanted = Eager(real.model), []
        logits = eager.feed(prompt)
        for _ in range(_STEPS):
            wanted.append(host_int(mx.argmax(logits, axis=-1)))
            logits = eager.feed([wanted[-1]])
        session = CompiledDecodeSession(real.model, PROMPT + _STEPS, evidence="ignore")
        got = list(session.generate(prompt, max_new_tokens=_STEPS))
        for index, (token, want) in enumerate(zip(got, wanted, strict=True)):
            if token != want:
                raise CheckFailed(f"token {index} is {token}, wanted {want}", where=f"token {index}")
        return {"tokens": _STEPS, "distinct_tokens": len(set(got))}
