"""The subject is able to fail: what naive compiling does to it is seen."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache

from mlx_audit.adapters.module_state import ModuleState
from mlx_audit.checks.base import Check, CheckFailed, Figures, NotRun
from mlx_audit.checks.runs import PROMPT, eager_logits, teacher_tokens
from mlx_audit.checks.subject import Subject
from mlx_audit.checks.tolerance import largest, largest_difference
from mlx_audit.decode import run

_STEPS = 6


class NaiveCompileIsCaught(Check):
    """The model's own caches, compiled naively by closure, are caught as wrong.

    What it does:
        Compiles a step that captures the model's own caches, runs the same teacher-forced tokens, and compares with
        eager decoding. From step 2 on the logits must be wrong: the write is frozen at the position of the trace.

    Why:
        A parity check that cannot see this fault would prove nothing. The first step is right, so that a test of one
        token never catches it.

    Example:
        the naive compile was not caught: 6 steps within the tolerance

    How to fix:
        If this fails, the tiny configuration is blind: scale it up, or look for what makes its logits constant.

    Sources:
        ml-explore/mlx-swift-lm#406
    """

    code = "NEG001"
    tier = "numeric"
    requires = ("ENV001",)
    repeated = False

    def run(self, subject: Subject) -> Figures:
        tokens = teacher_tokens(subject, PROMPT + _STEPS, stream=16)
        wanted = eager_logits(subject.model, tokens[:PROMPT], tokens[PROMPT:])[1:]
        caches = make_prompt_cache(subject.model)
        mx.eval(run(subject.model, mx.array([tokens[:PROMPT]], mx.int32), caches))
        got_naively = _naive(subject.model, caches, tokens[PROMPT:])
        differences, wrong = [], []
        for step, (got, want) in enumerate(zip(got_naively, wanted, strict=True), start=1):
            differences.append(largest_difference(got, want) / max(largest(want), 1e-30))
            if not subject.tolerance.accepts(got, want):
                wrong.append(step)
        figures = {
            "steps": _STEPS,
            "wrong_steps": wrong,
            "relative_differences": [float(f"{d:.3g}") for d in differences],
            "finding": "frozen write: wrong from the second step on, without an error",
        }
        if wrong != list(range(2, _STEPS + 1)):
            raise CheckFailed(
                f"wrong at steps {wrong}, wanted every step from 2 to {_STEPS}", figures=figures
            )
        return figures


def _naive(model: nn.Module, caches: list[Any], tokens: list[int]) -> list[mx.array]:
    """Return the logits of a step that is compiled with its caches captured; the module is left as it was.

    Raises:
        NotRun: it does not even run, so whether wrong logits would be seen is not known.
    """
    before = ModuleState(model)
    compiled, logits = mx.compile(lambda token: run(model, token, caches)), []
    try:
        for token in tokens:
            logits.append(compiled(mx.array([[token]], mx.int32)))
            mx.eval(logits)
    except Exception as error:
        raise NotRun(
            f"naive compiling raises {type(error).__name__}: {error}; it cannot go wrong silently"
        ) from error
    finally:
        before.restore()
    return logits
