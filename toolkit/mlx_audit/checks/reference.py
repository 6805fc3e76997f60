"""Eager decoding in float64: what both eager and compiled float32 are measured against."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.cache import make_prompt_cache

from mlx_audit.checks.float64 import IMPRECISE, in_float64
from mlx_audit.checks.runs import eager_logits
from mlx_audit.checks.subject import Subject
from mlx_audit.decode import run

_SHORTER = (mx.float32, mx.bfloat16, mx.float16)

_ROUNDS_NOTHING = frozenset(
    {
        *(
            "Arange",
            "AsStrided",
            "Broadcast",
            "Concatenate",
            "Copy",
            "ExpandDims",
            "Flatten",
            "Full",
            "Gather",
        ),
        *("Reshape", "Slice", "Squeeze", "Transpose", "Unflatten"),
    }
)
"""Primitives that only move: a constant in float32 is the same number in float64."""


class NoReference(Exception):
    """Why a model cannot be evaluated in float64."""


def float64_logits(subject: Subject, prompt: Sequence[int], tokens: Sequence[int]) -> list[mx.array]:
    """Return float64 logits after the prompt and after each of `tokens`, from the same float32 weights.

    It is eager decoding on the CPU, with the model's own caches.

    Raises:
        NoReference: an operation refuses float64, or computes in a shorter dtype.
    """
    model = subject.tiny_model("float32")
    model.set_dtype(mx.float64)
    with in_float64():
        try:
            rounding = first_rounding(model, prompt)
            if rounding is not None:
                raise NoReference(f"{rounding} computes in a shorter dtype than float64")
            return eager_logits(model, prompt, tokens)
        except (RuntimeError, ValueError, TypeError) as error:
            raise NoReference(f"float64 is refused: {error}") from error


def first_rounding(model: nn.Module, prompt: Sequence[int]) -> str | None:
    """Return the first primitive of a prompt's graph that is less exact than float64, or None."""
    found: list[str] = []

    def look(event: dict[str, Any]) -> None:
        if event["type"] == "primitive" and _rounds(event):
            found.append(str(event["name"]))

    ids = mx.array([list(prompt)], mx.int32)
    mx.export_function(look, lambda tokens: run(model, tokens, make_prompt_cache(model)), ids)
    return next(iter(found), None)


def _rounds(event: dict[str, Any]) -> bool:
    inputs, outputs = ([dtype for _, _, dtype in event[side]] for side in ("inputs", "outputs"))
    if event["name"] == "AsType":
        return outputs[0] in _SHORTER and inputs[0] == mx.float64
    if event["name"] in IMPRECISE:
        return any(mx.issubdtype(dtype, mx.floating) for dtype in outputs)
    return event["name"] not in _ROUNDS_NOTHING and any(dtype in _SHORTER for dtype in outputs)


def error_against(got: mx.array, want: mx.array) -> float:
    """Return the largest difference from float64 logits, relative to the largest; minus infinity in both is none."""
    own, exact = np.array(got).astype(np.float64), np.array(want)
    chosen = ~(np.isneginf(own) & np.isneginf(exact))
    own, exact = own[chosen], exact[chosen]
    return float(np.max(np.abs(own - exact)) / np.max(np.abs(exact)))
