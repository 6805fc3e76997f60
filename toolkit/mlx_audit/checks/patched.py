"""PAR008: a patch of a model's source changes nothing that the model computes eagerly."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from mlx_audit.checks.base import Check, CheckFailed, Figures, NotRun
from mlx_audit.checks.content import leaves
from mlx_audit.checks.far import BEGINNING, STEPS, fill
from mlx_audit.checks.runs import PROMPT, Comparer, Eager, teacher_tokens, windows
from mlx_audit.checks.subject import Subject
from mlx_audit.checks.tolerance import Tolerance, tolerance_for
from mlx_audit.errors import describe
from mlx_audit.evidence.environment import backend
from mlx_audit.models.build import build_lazy, resolve_arguments
from mlx_audit.models.live import is_mlx_lms
from mlx_audit.models.positions import position_rows
from mlx_audit.tracing import source_line

_STEPS = 12
_WIDEST = 128
"""Tokens of the widest window that is turned, as in PAR001."""

_FAR = (599, 1_999, 8_191, 32_767, 70_001)
"""Beyond where products of two positions, or of one and a large prime, overflow 32 bits."""


class PatchKeepsEager(Check):
    """The patched model's eager logits equal the unpatched model's.

    What it does:
        Builds the tiny model from the installed source and from the patched one, with the same weights, and feeds both
        the same random tokens on their own caches: a prompt in one piece, in fives and one by one, each followed by
        single tokens, with windows past two of them; then steps at far positions, up to 70,004. Where the unpatched
        model raises, or contradicts its own result token by token, and the patched one agrees with that, the figures
        say so (`upstream`).

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
        turned = [window for window in windows(subject.model) if window <= _WIDEST]
        longest = max([PROMPT, *(2 * window + 1 for window in turned)])
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
        far = _compare_far(subject, unpatched)
        equal = comparer.largest == far.largest == 0.0
        return {
            **comparer.figures(),
            "far_max_difference": far.largest,
            "bit_equal": equal,
            "upstream": upstream,
        }


def _compare_far(subject: Subject, unpatched: nn.Module) -> Comparer:
    """Compare steps at far positions, after random keys and values in place of a text.

    Whole numbers of another width, and a threshold on the position, show there alone. The tolerance is that of another
    kernel: so far out, sines and cosines of a position come out of different formulas in different roundings.
    """
    comparer = Comparer(tolerance_for("kernel", "float32", backend()))
    rows = position_rows(subject.model, resolve_arguments(subject.module, subject.tiny))
    for position in _FAR:
        if rows is None or position + STEPS <= rows:
            new, old = (_far(model, subject, position) for model in (subject.model, unpatched))
            for step, (got, want) in enumerate(zip(new, old, strict=True), start=1):
                comparer.check(got, want, f"step {step} at the far position {position}")
    return comparer


def _far(model: nn.Module, subject: Subject, position: int) -> list[mx.array]:
    """Return the logits of eager steps; none where the caches are not all mlx-lm's, or none holds keys."""
    eager, tokens = Eager(model), teacher_tokens(subject, BEGINNING + STEPS, stream=23)
    held = leaves(eager.cache)
    if any(not is_mlx_lms(f"{type(one).__module__}.") for one in held) or not any(
        hasattr(one, "keys") for one in held
    ):
        return []
    eager.feed(tokens[:BEGINNING], chunk=1)
    fill(eager.cache, position - BEGINNING)
    return [eager.feed([token]) for token in tokens[BEGINNING:]]


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
