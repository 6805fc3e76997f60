"""Rows of different length, decoded side by side: each is what it would be alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import make_prompt_cache

from mlx_audit.caches import FixedCapacityCache
from mlx_audit.checks.base import Check, CheckFailed, Figures, NotRun
from mlx_audit.checks.parts import POISON, finite_poison
from mlx_audit.checks.runs import Comparer, Eager, require_traces, session_for, windows
from mlx_audit.checks.subject import Subject
from mlx_audit.checks.tolerance import largest_difference, tolerance_for
from mlx_audit.decode import CompiledDecodeSession, State
from mlx_audit.errors import ShapeMismatch
from mlx_audit.evidence.environment import backend
from mlx_audit.models.live import flat_specs

_LENGTHS = ((3, 9), (4, 13, 9), (1, 7))
_MANY = tuple(1 + row % 4 for row in range(33))
"""More rows than code is likely to branch at; compared with their solo runs alone."""
_TURNED = 1
"""Which of these goes on until each ring has turned twice."""

_STEPS, _EXTENSION = 4, 3


@dataclass(frozen=True)
class Batch:
    """Token ids of rows that are read to different lengths, and what is fed to them afterwards.

    Attributes:
        prompts: `[B, longest]`; ids beyond a row's length mean nothing.
        lengths: How many of each row count.
        pieces: What follows, `[B, 1]` for a step and `[B, L]` for a continuation.
    """

    prompts: np.ndarray
    lengths: tuple[int, ...]
    pieces: tuple[np.ndarray, ...]

    def solo(self, row: int) -> list[list[int]]:
        """Return what one row is fed when it is alone, call by call."""
        prompt = self.prompts[row, : self.lengths[row]].tolist()
        return [prompt, *(piece[row].tolist() for piece in self.pieces)]

    def other_row(self, row: int, vocabulary: int) -> Batch:
        """Return the batch with other tokens in one row."""
        shift = np.zeros((len(self.lengths), 1), int)
        shift[row] = 1
        pieces = tuple((piece + shift) % vocabulary for piece in self.pieces)
        return Batch((self.prompts + shift) % vocabulary, self.lengths, pieces)

    def other_padding(self, vocabulary: int) -> Batch:
        """Return the batch with other ids beyond the lengths."""
        beyond = np.arange(self.prompts.shape[1]) >= np.array(self.lengths)[:, None]
        return replace(self, prompts=np.where(beyond, (self.prompts + 1) % vocabulary, self.prompts))

    def name(self, call: int, row: int) -> str:
        """Return where the logits of a row came from, in words."""
        width = self.pieces[call - 1].shape[1] if call else 0
        kind = (
            "prefill"
            if not call
            else f"step {call}"
            if width == 1
            else f"extend of {width} after step {call - 1}"
        )
        return f"{kind}, row {row} of lengths {self.lengths}"


class RowsApart(Check):
    """Rows of different length equal their solo runs and don't see each other.

    What it does:
        Reads rows of 3 and 9, of 4, 13 and 9, and of 1 and 7 tokens, takes compiled steps, continues with three tokens
        at once and takes more steps; one of the batches goes on until each ring has turned twice. Compares each row
        with eager decoding of it alone, within the class `reordered` (a batched product may sum in another order), and
        with a batch in which one row has other tokens: the other rows must stay bit-equal. The step is traced once.
        33 rows of one to four tokens are compared with their solo runs too.

    Why:
        Rows of different length share the slot that is written, but not the position: a mask, a rotation or a window
        that takes the position of the longest row for all is right for that row alone.

    Example:
        logits differ at step 1, row 0 of lengths (3, 9), against its solo run

    How to fix:
        Give each row its own position, `[B]`, and mask the slots in front of its first token.

    Sources:
        mlx_lm/models/cache.py BatchKVCache, BatchRotatingKVCache (left padding)
    """

    code = "MSK004"
    tier = "numeric"
    requires = ("PAR005", "PAR003", "MSK001", "STA002")
    repeated = False

    def not_applicable(self, subject: Subject) -> str | None:
        return refusal_of_ragged_rows(subject)

    def run(self, subject: Subject) -> Figures:
        solo = Comparer(tolerance_for("reordered", subject.dtype, backend()))
        for batch in _batches(subject, _MANY):
            base = _session(subject, batch)
            got = _decoded(base, batch)
            for row in range(len(batch.lengths)):
                alone = Eager(subject.model)
                for call, (logits, piece) in enumerate(zip(got, batch.solo(row), strict=True)):
                    where = f"{batch.name(call, row)}, against its solo run"
                    solo.check(logits[row : row + 1], alone.feed(piece), where)
            for changed in () if batch.lengths == _MANY else (0, 1):
                other = _decoded(base, batch.other_row(changed, subject.vocabulary))
                _require_isolated(batch, other, got, changed)
        return {
            **solo.figures(),
            "lengths": _lengths(),
            "rows": len(_MANY),
            "windows": windows(subject.model),
        }


class PaddingUnseen(Check):
    """Padding is never seen: neither ids beyond a row's length, nor what lies in the slots before its first token.

    What it does:
        Reads rows of different length, once more with other ids beyond the lengths, and twice more with large finite
        numbers in every slot that pads a row. The logits of the prompt, of compiled steps, of a continuation and of
        further steps, across the turns of each ring, must be bit-equal.

    Why:
        Rows are padded on the left so that all write at the same slot. A padded slot that is seen gives a row a token
        that was never there, and how wrong that is depends on the other rows.

    Example:
        numbers in the padding moved the logits by 0.4 at step 1, row 0 of lengths (3, 9)

    How to fix:
        Hide the slots in front of each row's first token: those whose time is less than the row's left padding.

    Sources:
        mlx_lm/models/base.py create_causal_mask (left_padding)
    """

    code = "MSK005"
    tier = "numeric"
    requires = ("MSK004",)
    repeated = False

    def not_applicable(self, subject: Subject) -> str | None:
        return refusal_of_ragged_rows(subject)

    def run(self, subject: Subject) -> Figures:
        slots = 0
        for batch in _batches(subject):
            base = _session(subject, batch)
            want = _decoded(base, batch)
            other = _decoded(base, batch.other_padding(subject.vocabulary))
            _require_equal(batch, other, want, "other ids beyond the lengths")
            for value in (POISON, -POISON):
                poison = _Poison(batch.lengths, value)
                _require_equal(batch, _decoded(base, batch, poison), want, "numbers in the padding")
                slots += poison.slots
        return {"lengths": _lengths(), "windows": windows(subject.model), "poisoned_slots": slots}


def refusal_of_ragged_rows(subject: Subject) -> str | None:
    """Return why the caches cannot hold rows of different length.

    Only a ring that keeps its first tokens may refuse, and what stands for a class without a `merge` of its own.

    Raises:
        ShapeMismatch: refused for any other reason.
    """
    try:
        session_for(subject, 4, batch_size=2).prefill([[0, 0], [0, 0]], lengths=[1, 2])
    except ShapeMismatch as refusal:
        keeps = any(dict(spec.parameters).get("keep") for spec in flat_specs(subject.model))
        alone = any(not hasattr(native, "merge") for native in make_prompt_cache(subject.model))
        if (keeps or alone) and str(refusal.where).endswith(".merge"):
            return str(refusal)
        raise
    return None


def _batches(subject: Subject, *more: tuple[int, ...]) -> list[Batch]:
    if subject.vocabulary < 2:
        raise NotRun("one token in the vocabulary: rows cannot differ")
    generator = np.random.default_rng([subject.seed, 21])
    turning = 2 * max(windows(subject.model), default=0)

    def draw(*shape: int) -> np.ndarray:
        return generator.integers(0, subject.vocabulary, shape)

    batches = []
    for index, lengths in enumerate((*_LENGTHS, *more)):
        widths = [*[1] * _STEPS, _EXTENSION, *[1] * (turning if index == _TURNED else 0), 1, 1]
        rows = len(lengths)
        pieces = tuple(draw(rows, width) for width in widths)
        batches.append(Batch(draw(rows, max(lengths)), lengths, pieces))
    return batches


def _session(subject: Subject, batch: Batch) -> CompiledDecodeSession:
    capacity = max(batch.lengths) + sum(piece.shape[1] for piece in batch.pieces)
    return session_for(subject, capacity, batch_size=len(batch.lengths))


def _decoded(
    base: CompiledDecodeSession, batch: Batch, spoil: Callable[[CompiledDecodeSession], State] | None = None
) -> list[mx.array]:
    """Return the logits `[B, vocabulary]` after each call; `spoil` changes the state that prefill has left."""
    session = base.copy()
    logits = [session.prefill(batch.prompts.tolist(), lengths=list(batch.lengths))]
    if spoil is not None:
        session = session.with_state(spoil(session))
    positions = []
    for piece in batch.pieces:
        if piece.shape[1] > 1:
            logits.append(session.extend(piece.tolist()))
        else:
            logits.append(session.step(piece[:, 0].tolist()))
            positions.append(session.position)
    require_traces(session, positions, {"lengths": list(batch.lengths)})
    return logits


class _Poison:
    """Writes a value into every slot that pads a row, as prefill has left them.

    Args:
        lengths: Tokens of each row.
        value: What to write.
    """

    def __init__(self, lengths: tuple[int, ...], value: float) -> None:
        self._lengths, self._value = lengths, value
        self.slots = 0
        """Slots written so far, over all rows and caches."""

    def __call__(self, session: CompiledDecodeSession) -> State:
        return [
            [
                self._spoiled(array, part) if role == "buffer" else array
                for part in cache.parts
                for array, role in zip(part.state, part.roles, strict=True)
            ]
            for cache in session.caches
        ]

    def _spoiled(self, buffer: mx.array, part: FixedCapacityCache) -> mx.array:
        padding = self._padding(buffer.shape[2])
        self.slots += int(padding.sum())
        floating = mx.issubdtype(buffer.dtype, mx.floating)
        value = finite_poison(self._value, part, buffer.dtype) if floating else 1 << 30
        return mx.where(mx.array(padding)[:, None, :, None], mx.array(value, buffer.dtype), buffer)

    def _padding(self, slots: int) -> np.ndarray:
        """Return which slots `[B, slots]` hold padding: a slot holds the latest time that shares it."""
        last = max(self._lengths) - 1
        times = last - (last - np.arange(slots)) % slots
        padding = last + 1 - np.array(self._lengths)[:, None]
        return (times >= 0) & (times < padding)


def _require_isolated(batch: Batch, other: list[mx.array], got: list[mx.array], changed: int) -> None:
    for call, (logits, before) in enumerate(zip(other, got, strict=True)):
        for row in range(len(batch.lengths)):
            same = largest_difference(logits[row], before[row]) == 0
            if same == (row == changed):
                what = "did not change with its own" if same else f"changed when row {changed} had other"
                where = batch.name(call, row)
                raise CheckFailed(f"row {row} {what} tokens, at {where}", where=where)


def _require_equal(batch: Batch, got: list[mx.array], want: list[mx.array], what: str) -> None:
    for call, (logits, expected) in enumerate(zip(got, want, strict=True)):
        for row in range(len(batch.lengths)):
            difference = largest_difference(logits[row], expected[row])
            if difference != 0:
                where = batch.name(call, row)
                raise CheckFailed(f"{what} moved the logits by {difference:.3g} at {where}", where=where)


def _lengths() -> list[list[int]]:
    return [list(lengths) for lengths in _LENGTHS]
