"""Far positions: what differs only after hundreds or thousands of tokens."""

from __future__ import annotations

from mlx_audit.checks.base import Check, Figures
from mlx_audit.checks.far import STEPS, compare_far
from mlx_audit.checks.runs import (
    Comparer,
    Eager,
    require_traces,
    rungs_of,
    session_for,
    teacher_tokens,
)
from mlx_audit.checks.scenario import Scenario, during
from mlx_audit.checks.subject import Subject
from mlx_audit.decode.session import EXTEND_PIECE
from mlx_audit.models.build import resolve_arguments
from mlx_audit.models.live import flat_specs
from mlx_audit.models.positions import position_rows

_CHUNK = 2048
"""Tokens a chunk of prefill, in mlx-lm and here."""

_EXTENSIONS = (65, 257)
"""Multi-token continuations: longer than any that the other checks feed, and across a rung."""

_FAR = (599, 1_999, 8_191, 32_767)
"""Positions before which nothing is read; the steps from there on reach round numbers, decimal and binary."""


class LatePositions(Check):
    """Logits equal eager decoding at far positions, across the edges of rungs, and for long continuations.

    What it does:
        Reads prompts of 250 and 1,100 tokens (4,090 too in the profiles ci and nightly), takes compiled steps that
        cross from one rung to the next, and continues with 65 and 257 tokens at once; compares with eager decoding.
        There is one trace a rung; a stack of rings has no more rungs once its longest ring is full, and one without
        attention has one. In the profile quick, recurrent stacks read the shortest prompt only: many go through it
        token by token. `left_out` names the others. Where there is attention, three steps are compared at far positions
        up to 32,770 too, after random keys and values instead of a prompt, in each dtype, with what they write. Nothing
        goes beyond a table of learned positions: `rows_of_positions`.

    Why:
        Eager decoding gives the model a host integer, and code may branch on it: `if offset > 1000`. Compiled decoding
        gives it an array, and the branch is never taken. A threshold on the length of the keys sees the rung instead.
        Neither shows at the few dozen positions of the other checks.

    Example:
        logits differ at step 1 after a prompt of 1100, capacity 1300

    How to fix:
        Compute with the position as an array (`mx.where`), at every position alike; never branch on its type or value,
        nor on the number of keys.

    Sources:
        mlx_lm/models/ministral3.py (attention scale by position); rope_utils.py DynamicNTKScalingRoPE
    """

    code = "PAR007"
    tier = "numeric"
    requires = ("PAR001", "PAR003")
    repeated = False

    def run(self, subject: Subject) -> Figures:
        rows = position_rows(subject.model, resolve_arguments(subject.module, subject.tiny))
        comparer, runs = Comparer(subject.tolerance), _runs(subject, rows)
        rungs = sum(self._one(subject, comparer, *run) for run in runs)
        prompts = [prompt for prompt, *_ in subject.amounts.late]
        far = [position for position in _FAR if rows is None or position + STEPS <= rows]
        return {
            **comparer.figures(),
            "prompts": prompts[: len(runs)],
            "left_out": prompts[len(runs) :],
            "rungs": rungs,
            "far": compare_far(subject, far),
            **({"rows_of_positions": rows} if rows is not None else {}),
        }

    @staticmethod
    def _one(subject: Subject, comparer: Comparer, prompt: int, steps: int, capacity: int) -> int:
        tokens = teacher_tokens(subject, capacity, stream=19)
        session, eager = session_for(subject, capacity, prefill_step_size=_CHUNK), Eager(subject.model)
        label = f"a prompt of {prompt}, capacity {capacity}"
        want = eager.feed(tokens[:prompt], chunk=_CHUNK)
        comparer.check(session.prefill([tokens[:prompt]]), want, f"prefill of {label}")
        at, stepped = prompt, list[int]()
        for length in [*[1] * steps, *_EXTENSIONS, 1]:
            piece = tokens[at : at + length]
            if len(piece) < length:
                break
            got = session.step(piece) if length == 1 else session.extend([piece])
            with during(Scenario(prompt, steps, capacity, _CHUNK, stream=19, dtype=subject.dtype)):
                comparer.check(
                    got,
                    eager.feed(piece, chunk=EXTEND_PIECE),
                    f"{length} more at position {at} after {label}",
                )
            at += length
            stepped += [at] if length == 1 else []
        require_traces(session, stepped, {**comparer.figures(), "prompt": prompt})
        return len(rungs_of(session, stepped))


def _runs(subject: Subject, rows: int | None) -> tuple[tuple[int, int, int], ...]:
    """Return prompt, steps and capacity of each run; none goes past a table of learned positions."""
    recurrent = any(spec.kind == "arrays" for spec in flat_specs(subject.model))
    runs = subject.amounts.late[:1] if recurrent and subject.profile == "quick" else subject.amounts.late
    return tuple(run for run in runs if rows is None or run[2] <= rows)
