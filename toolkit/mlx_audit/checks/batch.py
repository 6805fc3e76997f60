"""Rows decoded side by side: each is what it would be alone."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import make_prompt_cache

from mlx_audit.checks.base import Check, CheckFailed, Figures, NotRun
from mlx_audit.checks.runs import Comparer, Eager, session_for
from mlx_audit.checks.subject import Subject
from mlx_audit.checks.tolerance import largest_difference, tolerance_for
from mlx_audit.decode import run
from mlx_audit.evidence.environment import backend

_SIZES, _PROMPT, _STEPS = (2, 3, 5), 7, 4


class BatchRows(Check):
    """Each row of a batch equals eager decoding, its solo run, and does not see its neighbours.

    What it does:
        Decodes two, three and five rows of equal length side by side and compares with eager decoding of the same
        batch, within the variant's class; with each row decoded alone, within the class `reordered` (a batched product
        may sum in another order); and with a batch in which one row has other tokens, where the other rows must stay
        bit-equal.

    Why:
        A mask or position that is broadcast along the wrong axis is right for one row and wrong for several.

    Example:
        row 1 differs from its solo run at step 2; row 0 changed when row 1 had other tokens

    How to fix:
        Keep masks at rank 4, `[1 or B, 1, N, keys]`.

    Sources:
        mlx_lm/models/gemma2.py (batched masks against 5-D scores broadcast to the wrong axis)
    """

    code = "PAR005"
    tier = "numeric"
    requires = ("PAR001",)
    repeated = False

    def run(self, subject: Subject) -> Figures:
        if subject.vocabulary < 2:
            raise NotRun("one token in the vocabulary: rows cannot differ")
        generator = np.random.default_rng([subject.seed, 18])
        figures: Figures = {}
        for size in _SIZES:
            rows = generator.integers(0, subject.vocabulary, (size, _PROMPT + _STEPS)).tolist()
            figures[f"rows_{size}"] = self._batch(subject, rows)
        return figures

    def _batch(self, subject: Subject, rows: list[list[int]]) -> Figures:
        got = self._compiled(subject, rows)
        batch, solo = (
            Comparer(subject.tolerance),
            Comparer(tolerance_for("reordered", subject.dtype, backend())),
        )
        for step, (logits, want) in enumerate(zip(got, self._eager(subject, rows), strict=True)):
            batch.check(logits, want, f"step {step} of a batch of {len(rows)}")
        for index, row in enumerate(rows):
            alone = Eager(subject.model)
            wanted = [alone.feed(row[:_PROMPT]), *(alone.feed([token]) for token in row[_PROMPT:])]
            for step, (logits, want) in enumerate(zip(got, wanted, strict=True)):
                solo.check(logits[index : index + 1], want, f"step {step}, row {index} against its solo run")
        self._isolated(subject, rows, got)
        return {**batch.figures(), "solo_max_difference": solo.largest}

    @staticmethod
    def _compiled(subject: Subject, rows: list[list[int]]) -> list[mx.array]:
        session = session_for(subject, _PROMPT + _STEPS, batch_size=len(rows))
        logits = [session.prefill([row[:_PROMPT] for row in rows])]
        for step in range(_PROMPT, _PROMPT + _STEPS):
            logits.append(session.step([row[step] for row in rows]))
        if session.trace_count != 1:
            raise CheckFailed(f"traced {session.trace_count} times, wanted 1")
        return logits

    @staticmethod
    def _eager(subject: Subject, rows: list[list[int]]) -> list[mx.array]:
        caches, tokens = make_prompt_cache(subject.model), mx.array(rows, mx.int32)
        pieces = [tokens[:, :_PROMPT], *(tokens[:, at : at + 1] for at in range(_PROMPT, _PROMPT + _STEPS))]
        return [run(subject.model, piece, caches) for piece in pieces]

    def _isolated(self, subject: Subject, rows: list[list[int]], got: list[mx.array]) -> None:
        changed = [list(row) for row in rows]
        changed[1] = [(token + 1) % subject.vocabulary for token in rows[1]]
        for step, (logits, before) in enumerate(zip(self._compiled(subject, changed), got, strict=True)):
            for index in (i for i in range(len(rows)) if i != 1):
                if largest_difference(logits[index], before[index]) != 0:
                    raise CheckFailed(
                        f"row {index} changed at step {step} when row 1 had other tokens",
                        where=f"step {step}, row {index}",
                    )
            if largest_difference(logits[1], before[1]) == 0:
                raise CheckFailed("row 1 did not change with its tokens, so nothing was tested")
