"""What does not fit is refused before anything is dispatched: MLX itself would write outside the buffer."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_audit.decode import CompiledDecodeSession
from mlx_audit.errors import CapacityExceeded, SessionMisuse, ShapeMismatch
from tiny_models import Eager, distance, shared_model, state_bytes, tokens

CAPACITY = 37


@pytest.fixture
def full() -> CompiledDecodeSession:
    session = CompiledDecodeSession(shared_model(), CAPACITY, evidence="ignore")
    ids = tokens(CAPACITY)
    session.prefill([ids[:5]])
    for token in ids[5:]:
        session.step([token])
    return session


def test_the_last_slot_is_taken_and_one_more_is_refused(full: CompiledDecodeSession) -> None:
    eager = Eager(shared_model())
    ids = tokens(CAPACITY)
    eager.feed([ids[:5]])
    for token in ids[5:]:
        eager.feed([[token]])
    for cache, own in zip(full.state, eager.caches, strict=True):
        assert distance(cache[0], own.keys[..., :CAPACITY, :]) == 0.0
    before = state_bytes(full)
    with pytest.raises(
        CapacityExceeded, match=r"step: .*found: 37 held and 1 more; allowed: 37 .*38 or more"
    ):
        full.step([1])
    assert (full.position, full.remaining, full.trace_count) == (37, 0, 1)
    assert state_bytes(full) == before
    assert full.trim(1) == 1
    full.trim(1)
    for cache in eager.caches:
        cache.trim(2)
    assert distance(full.step([9]), eager.feed([[9]])) == 0.0


def test_nothing_is_dispatched_by_a_refusal(
    full: CompiledDecodeSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: Any, **__: Any) -> None:
        raise AssertionError("the model was called")

    before = state_bytes(full)
    monkeypatch.setattr(type(shared_model()), "__call__", never)
    monkeypatch.setattr(full, "_compiled", never)
    for call in (lambda: full.step([1]), lambda: full.extend([[1]]), lambda: full.generate([1], 1)):
        with pytest.raises(CapacityExceeded):
            call()
    assert state_bytes(full) == before


def test_a_thousand_random_attempts_leave_a_full_session_as_it_was(full: CompiledDecodeSession) -> None:
    random = np.random.default_rng(0)
    before = state_bytes(full)
    for _ in range(1000):
        count = int(random.choice([1, 2, 3, 36, 37, 38, 300, 5000]))
        attempt = {
            0: lambda count: full.step([count % 64]),
            1: lambda count: full.extend([[1] * count]),
            2: lambda count: full.generate([1] * count, count),
            3: lambda count: full.prefill([[1] * count]),
        }[int(random.integers(4))]
        with pytest.raises((CapacityExceeded, SessionMisuse)):
            attempt(count)
        if random.integers(10) == 0:
            assert state_bytes(full) == before
    assert state_bytes(full) == before
    assert (full.position, full.trace_count) == (CAPACITY, 1)
    # And the session still works as if nothing had been tried.
    full.trim(1)
    logits = full.step([tokens(CAPACITY)[-1]])
    assert state_bytes(full) == before
    assert bool(mx.isfinite(logits).all())


@pytest.mark.parametrize("held", [0, 3, 30])
def test_random_attempts_from_a_partly_filled_session(held: int) -> None:
    session = CompiledDecodeSession(shared_model(), CAPACITY, evidence="ignore")
    if held:
        session.prefill([tokens(held)])
    before = state_bytes(session)
    room = CAPACITY - held
    for excess in (1, 2, 40, 100_000):
        count = room + excess
        for call, arguments in (
            (session.generate, ([1], count)),
            (session.generate, ([1] * count, 1)),
            (session.extend, ([[1] * count],)),
            (session.prefill, ([[1] * count],)),
        ):
            with pytest.raises((CapacityExceeded, SessionMisuse)):
                call(*arguments)
    assert (session.position, state_bytes(session)) == (held, before)


def test_generate_may_fill_the_last_slot_exactly() -> None:
    session = CompiledDecodeSession(shared_model(), 12, evidence="ignore")
    # 5 prompt tokens and 8 new ones: the eighth is not fed back.
    assert len(list(session.generate(tokens(5), 8))) == 8
    assert session.remaining == 0
    with pytest.raises(CapacityExceeded):
        CompiledDecodeSession(shared_model(), 12, evidence="ignore").generate(tokens(5), 9)


def test_generate_checks_when_it_is_called_and_not_when_it_is_read() -> None:
    session = CompiledDecodeSession(shared_model(), 4, evidence="ignore")
    for wrong in (
        {"prompt": tokens(5)},
        {"prompt": [64]},
        {"prompt": []},
        {"prompt": [1], "max_new_tokens": 0},
    ):
        with pytest.raises((CapacityExceeded, ShapeMismatch)):
            session.generate(**wrong)


def test_neighbouring_heads_and_rows_stay_untouched_up_to_the_last_slot() -> None:
    session = CompiledDecodeSession(shared_model(), 5, batch_size=2, evidence="ignore")
    ids = tokens(10)
    session.prefill([ids[:4], ids[4:8]])
    before = [np.array(array) for arrays in session.state for array in arrays[:2]]
    session.step([1, 2])
    after = [np.array(array) for arrays in session.state for array in arrays[:2]]
    for old, new in zip(before, after, strict=True):
        assert np.array_equal(old[:, :, :4], new[:, :, :4])
        assert np.abs(new[:, :, 4]).min() > 0


@pytest.mark.parametrize("size", [0, -1, True, 1.5, "eight", None, 2**31, 10**30])
def test_sizes_that_no_buffer_can_have(size: Any) -> None:
    for name in ("max_tokens", "batch_size", "prefill_step_size"):
        with pytest.raises(ShapeMismatch, match=name):
            CompiledDecodeSession(shared_model(), evidence="ignore", **{name: size})
