"""PAR008: a patch of a model's source changes nothing that the model computes eagerly."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from mlx_audit.checks.base import Check, CheckFailed, Figures, NotRun
from mlx_audit.checks.runs import PROMPT, Comparer, Eager, teacher_tokens, windows
from mlx_audit.checks.subject import Subject
from mlx_audit.checks.tolerance import Tolerance, tolerance_for
from mlx_audit.errors import describe
from mlx_audit.evidence.environment import backend
from mlx_audit.models.build import build_lazy, resolve_arguments
from mlx_audit.tracing import source_line

_STEPS = 12


class PatchKeepsEager(Check):
    """The patched model's eager logits equal the unpatched model's.

    What it does:
        Builds the tiny model from the installed source and from the patched one, with the same weights, and feeds both
        the same random tokens on their own caches: a prompt in one piece, in fives and one by one, each followed by
        single tokens; with windows, past two of them. Where the unpatched model raises, or contradicts its own result
        token by token, and the patched one agrees with that, the figures say so (`upstream`).

    Why:
        A patch that makes compiled decoding equal to a changed eager model proves nothing about the published weights.

    Example:
        logits differ at step 3 after a prompt of 13 in one piece: got 1.25, wanted 1.5

    How to fix:
        Look at the patch: `mlx-audit adapt TARGET --as patch`. Where the unpatched model is wrong and the difference is
        meant, mend the model's source first, and adapt that.

    Sources:
        the model's source as installed
    """

    code = "PAR008"
    tier = "numeric"

    def not_applicable(self, subject: Subject) -> str | None:
        return "the source is as installed" if subject.original is None else None

    def run(self, subject: Subject) -> Figures:
        unpatched = _unpatched(subject)
        tolerance = tolerance_for("reordered", "float32", backend())
        comparer, upstream = Comparer(tolerance), dict[str, str]()
        longest = max([PROMPT, *(2 * window + 1 for window in windows(subject.model))])
        tokens = teacher_tokens(subject, longest + _STEPS)
        alone = _fed(unpatched, tokens, longest, 1)
        if isinstance(alone, str):
            raise NotRun(f"the unpatched model cannot decode eagerly: {alone}")
        for chunk, name in ((longest, "in one piece"), (5, "in fives"), (1, "one by one")):
            wanted = alone if chunk == 1 else _fed(unpatched, tokens, longest, chunk)
            if isinstance(wanted, str):
                upstream[f"prompt {name}"] = f"raises: {wanted}"
                wanted = alone
            got = _fed(subject.model, tokens, longest, chunk)
            if isinstance(got, str):
                raise CheckFailed(
                    f"the patched model raises with a prompt {name}: {got}", where=f"prompt {name}"
                )
            apart = _apart(tolerance, wanted, alone)
            if apart and not _apart(tolerance, got, alone):
                upstream[f"prompt {name}"] = f"differs from its own result one by one: {apart}"
                wanted = alone
            for step, (new, old) in enumerate(zip(got, wanted, strict=True)):
                comparer.check(new, old, f"step {step} after a prompt of {longest} {name}")
        return {**comparer.figures(), "bit_equal": comparer.largest == 0.0, "upstream": upstream}


def _apart(tolerance: Tolerance, got: Sequence[mx.array], wanted: Sequence[mx.array]) -> str:
    """Return what the first different logits differ by; empty where all are equal."""
    for new, old in zip(got, wanted, strict=True):
        if objection := tolerance.objection(new, old):
            return objection
    return ""


def _unpatched(subject: Subject) -> nn.Module:
    """The tiny model of the installed source, with the weights of the patched one."""
    assert subject.original is not None, "there is a patch"
    model = build_lazy(subject.original, resolve_arguments(subject.original, subject.tiny))
    before, after = (dict(tree_flatten(of.parameters())).keys() for of in (model, subject.model))
    if before != after:
        changed = ", ".join(sorted(before ^ after)[:3])
        raise CheckFailed(f"the patch changes the names of parameters: {changed}", where="parameters")
    model.update(subject.model.parameters())
    return model


def _fed(model: nn.Module, tokens: Sequence[int], prompt: int, chunk: int) -> list[mx.array] | str:
    """Return the logits after the prompt and after each further token, or what the model raised and where."""
    eager = Eager(model)
    try:
        first = eager.feed(tokens[:prompt], chunk=chunk)
        return [first, *(eager.feed([token]) for token in tokens[prompt:])]
    except Exception as error:
        return f"{describe(error)} at {source_line(error)}"
