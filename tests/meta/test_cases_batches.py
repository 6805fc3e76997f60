"""Public bug reports about ragged batches and shared positions, retold as small trials on tiny models."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import ArraysCache, BatchKVCache

from mlx_audit.caches.arrays import FixedCapacityArraysCache
from mlx_audit.caches.slots import SlottedCache
from mlx_audit.decode import CompiledDecodeSession
from mlx_audit.errors import HostState
from tiny_models import Eager, distance, tokens
from zoo_models import zoo_model

MENDED = "mlx-lm has mended this: say so in the changelog"
REORDERED = 1e-4


def _session(model: Any, capacity: int, *rest: Any, **options: Any) -> CompiledDecodeSession:
    return CompiledDecodeSession(model, capacity, *rest, evidence="ignore", **options)


@pytest.mark.parametrize("lengths", [(3, 9), (9, 3)])
def test_mlx_lm_1736_padding_updates_a_recurrent_state(lengths: tuple[int, int]) -> None:
    """https://github.com/ml-explore/mlx-lm/pull/1736

    The mask of the padding was dropped, so that pads went into the state of a recurrence, which never forgets.
    """
    model, rows = zoo_model("qwen3_next"), [tokens(20, seed=1), tokens(20, seed=2)]
    session = _session(model, 20, 2, prefill_step_size=4)
    solo = [_session(model, 20, prefill_step_size=4) for _ in rows]
    logits = session.prefill([row[:9] for row in rows], lengths=lengths)
    wanted = [own.prefill([row[:n]]) for own, row, n in zip(solo, rows, lengths, strict=True)]
    for step in range(9):
        assert max(distance(logits[i : i + 1], want) for i, want in enumerate(wanted)) < 1e-5
        logits = session.step([row[9 + step] for row in rows])
        wanted = [own.step([row[9 + step]]) for own, row in zip(solo, rows, strict=True)]
    assert (session.position, session.trace_count) == (18, 1)


def test_mlx_lm_1736_other_marks_of_padding_are_refused() -> None:
    """https://github.com/ml-explore/mlx-lm/pull/1736

    `advance` changes them in place, outside of any state, and an empty batch is cut below nothing.
    """
    padded = ArraysCache(1, left_padding=[6, 0])
    padded[0] = mx.zeros((2, 1))
    with pytest.raises(HostState, match="still counts the padding"):
        FixedCapacityArraysCache.adopt(padded, 9)
    ours = FixedCapacityArraysCache.like(padded, 9)
    ours.advance(3)
    assert (ours.lengths, ours.left_padding, ours.make_mask(3), len(ours.state)) == (None, None, None, 1)
    empty = BatchKVCache([2, 3])
    empty.filter(mx.array([0]))
    assert empty._idx == -2, MENDED


@pytest.fixture
def moved_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make positions advance by `+=`, which moves every offset that was handed out before."""

    def advance(self: Any, length: int) -> None:
        self._position += length

    monkeypatch.setattr(SlottedCache, "offset", property(lambda self: self._position))
    monkeypatch.setattr(SlottedCache, "_advance", advance)


def _worst(family: str) -> float:
    """Return the largest distance of ten steps from eager decoding with the model's own caches."""
    model, ids = zoo_model(family), tokens(16)
    session, eager = _session(model, 16), Eager(model)
    assert distance(session.prefill([ids[:6]]), eager.feed([ids[:6]])) < REORDERED
    return max(distance(session.step([token]), eager.feed([[token]])) for token in ids[6:])


FAMILIES = ("gemma3n", "gemma4_text", "gpt2", "llama")


@pytest.mark.parametrize("family", FAMILIES)
def test_mlx_lm_1806_shared_layers_use_the_owners_position_before_the_update(family: str) -> None:
    """https://github.com/ml-explore/mlx-lm/issues/1806

    An offset taken before the update showed the value after it, and layers that share a cache rotated by that.
    """
    assert _worst(family) < REORDERED


@pytest.mark.parametrize("family", FAMILIES)
def test_mlx_lm_1806_an_offset_that_moves_is_caught(family: str, moved_in_place: None) -> None:
    """https://github.com/ml-explore/mlx-lm/issues/1806

    By gemma3n, which rotates its queries after the update; the others are done with the offset by then.
    """
    assert (_worst(family) > 0.1) == (family == "gemma3n")
