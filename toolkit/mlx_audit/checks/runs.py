"""What numeric checks share: tokens, sessions, eager references, and comparisons that print got, wanted and where."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.cache import make_prompt_cache

from mlx_audit.checks.base import CheckFailed
from mlx_audit.checks.subject import Subject
from mlx_audit.checks.tolerance import Tolerance, largest_difference, relative_difference
from mlx_audit.decode import CompiledDecodeSession, State, run
from mlx_audit.decode.ladder import rung_for
from mlx_audit.models.live import flat_specs

PROMPT = 13
"""Tokens of the usual prompt: long enough for a wrong position to matter, odd against any chunk."""


def teacher_tokens(subject: Subject, count: int, *, stream: int = 0) -> list[int]:
    """Return random token ids from the seed; `stream` gives further independent ones."""
    generator = np.random.default_rng([subject.seed, stream])
    return [int(token) for token in generator.integers(0, subject.vocabulary, count)]


def session_for(
    subject: Subject, capacity: int, *, model: nn.Module | None = None, **options: Any
) -> CompiledDecodeSession:
    """Return a session on the subject's tiny model, without asking for evidence: this is how evidence is made."""
    return CompiledDecodeSession(model or subject.model, capacity, evidence="ignore", **options)


def windows(model: nn.Module) -> list[int]:
    """Return the distinct sizes, in tokens, after which a cache of the model forgets: of rings and of chunks."""
    parameters = [dict(spec.parameters) for spec in flat_specs(model)]
    return sorted({own[name] for own in parameters for name in ("window", "chunk") if name in own})


def rungs_of(session: CompiledDecodeSession, positions: Iterable[int]) -> set[int]:
    """Return the rungs over which steps that end at `positions` attend; without attention all are one.

    A step attends over no more slots than there are: a stack of rings stops at the longest ring.
    """
    slots = max((cache.slots for cache in session.caches), default=0)
    return {min(rung_for(position, session.capacity), slots) for position in positions}


def require_traces(session: CompiledDecodeSession, positions: Sequence[int], figures: dict[str, Any]) -> None:
    """Require one trace for each rung of the steps taken, which ended at `positions`.

    Raises:
        CheckFailed: with what forced the further traces.
    """
    wanted = len(rungs_of(session, positions))
    if session.trace_count != wanted:
        raise CheckFailed(
            f"traced {session.trace_count} times in {len(positions)} steps, wanted {wanted}: "
            + "; ".join(session.retrace_reasons[:2]),
            figures=figures,
        )


class Eager:
    """The reference: eager decoding with the model's own caches."""

    def __init__(self, model: nn.Module, *, cache: list[Any] | None = None) -> None:
        self.model = model
        self.cache = make_prompt_cache(model) if cache is None else cache

    def feed(self, tokens: Sequence[int], *, chunk: int | None = None) -> mx.array:
        """Feed tokens (in chunks) and return the logits `[1, vocabulary]` after the last."""
        size = chunk or len(tokens)
        for start in range(0, len(tokens), size):
            logits = run(self.model, mx.array([tokens[start : start + size]], mx.int32), self.cache)
            mx.eval(logits)
        return logits


def eager_logits(model: nn.Module, prompt: Sequence[int], tokens: Sequence[int]) -> list[mx.array]:
    """Return the logits after the prompt and after each of `tokens`, fed one at a time."""
    eager = Eager(model)
    return [eager.feed(prompt), *(eager.feed([token]) for token in tokens)]


class Comparer:
    """Compares logits step by step and remembers the largest difference."""

    def __init__(self, tolerance: Tolerance) -> None:
        self.tolerance = tolerance
        self.largest = 0.0
        self.needed = 0.0
        """The smallest relative tolerance that would have accepted all comparisons so far."""
        self.compared = 0

    def check(self, got: mx.array, want: mx.array, where: str) -> None:
        """Compare and fail with got, wanted, tolerance and place.

        Raises:
            CheckFailed: another shape, not finite, another most likely token, or outside the bound.
        """
        difference = largest_difference(got, want)
        self.largest = max(self.largest, difference)
        self.needed = max(self.needed, relative_difference(got, want))
        self.compared += 1
        objection = self.tolerance.objection(got, want)
        if objection is not None:
            raise CheckFailed(
                f"logits differ at {where}: {objection}, largest difference {difference:.3g}, allowed "
                f"{self.tolerance.allowed(want):.3g} ({self.tolerance.name})",
                where=where,
                figures=self.figures(),
            )

    def figures(self) -> dict[str, Any]:
        """Return what was measured."""
        return {
            "compared": self.compared,
            "max_difference": self.largest,
            "minimum_tolerance": self.needed,
            "class": self.tolerance.name,
        }


def same_bytes(first: State, second: State) -> bool:
    """Return whether two states hold the same arrays, bit by bit."""
    return state_bytes(first) == state_bytes(second)


def state_bytes(state: State) -> list[bytes]:
    """Return the bytes of every array of a state."""
    mx.eval(state)  # a placeholder of a trace raises here, in words that `execute` knows
    leaves = [array for arrays in state for array in arrays]
    return [np.array(mx.view(mx.reshape(array, (-1,)), mx.uint8)).tobytes() for array in leaves]


def live_arrays(model: nn.Module) -> None:
    """Evaluate every array on the module; a placeholder left behind by a trace raises.

    Raises:
        CheckFailed: names the first attribute that holds a placeholder.
    """
    for path, module in model.named_modules():
        for holder in (dict(module), vars(module)):
            for name, value in holder.items():
                if isinstance(value, mx.array):
                    try:
                        mx.eval(value)
                    except (ValueError, RuntimeError) as error:
                        raise CheckFailed(
                            f"the module holds a placeholder of a trace: {error}", where=f"{path}.{name}"
                        ) from error
