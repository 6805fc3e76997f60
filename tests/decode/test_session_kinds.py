"""Sessions over caches of every kind: rows of different length, and caches that the forward never writes."""

from __future__ import annotations

import gc

import mlx.core as mx
import pytest
from mlx_lm.models.cache import KVCache, RotatingKVCache, make_prompt_cache

from mlx_audit.decode import CompiledDecodeSession
from mlx_audit.errors import HostState, ShapeMismatch
from tiny_models import Eager, distance, shared_model, state_bytes, tiny_model, tokens
from zoo_models import zoo_model


def new_session(model: object = None, capacity: int = 40, **options: object) -> CompiledDecodeSession:
    return CompiledDecodeSession(model or shared_model(), capacity, evidence="ignore", **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("family", ["llama", "qwen3_next"])
def test_rows_of_different_length_equal_their_solo_runs(family: str) -> None:
    """Rings that turn, and recurrences, which would never forget a pad."""
    model, rows, lengths = zoo_model(family), [tokens(24, seed=s) for s in (1, 2, 3)], [1, 9, 4]
    session, solo = new_session(model, 24, batch_size=3), [Eager(model) for _ in rows]
    logits = session.prefill([row[:9] for row in rows], lengths=lengths)
    wanted = [own.feed([row[:n]]) for own, row, n in zip(solo, rows, lengths, strict=True)]
    for start, end in [(at, at + 1) for at in range(9, 18)] + [(18, 22), (22, 23)]:
        assert max(distance(logits[i : i + 1], want) for i, want in enumerate(wanted)) < 1e-4
        feed = session.extend if end - start > 1 else lambda ids: session.step([row[0] for row in ids])
        logits = feed([row[start:end] for row in rows])
        wanted = [own.feed([row[start:end]]) for own, row in zip(solo, rows, strict=True)]
    assert (session.position, session.trace_count) == (23, 1)


def test_a_ragged_batch_forgets_what_every_row_has() -> None:
    session = new_session(batch_size=2)
    session.prefill([tokens(9), tokens(9)], lengths=[2, 9])
    assert (session.trim(3), session.trim(2), session.position) == (0, 2, 7)
    left, right = (Eager(shared_model()) for _ in range(2))
    right.feed([tokens(7)])
    for a, b in zip(tokens(5, seed=4), tokens(5, seed=5), strict=True):
        logits = session.step([a, b])
        assert distance(logits[:1], left.feed([[a]])) < 1e-4
        assert distance(logits[1:], right.feed([[b]])) < 1e-4


def test_buffers_of_a_ragged_batch_are_written_in_place() -> None:
    """Nothing but the session's state holds them; a second holder would keep them, and cost a copy."""
    session = new_session(capacity=1 << 16, batch_size=2)
    session.prefill([tokens(4), tokens(4)], lengths=[2, 4])
    buffer = session.state[0][0].nbytes
    gc.collect()
    held = mx.get_active_memory()
    session.step([1, 2])
    gc.collect()
    assert mx.get_active_memory() - held < buffer
    mx.reset_peak_memory()
    base = mx.get_active_memory()
    for token in tokens(3):
        session.step([token, token])
    assert mx.get_peak_memory() - base < buffer


def test_a_cache_that_is_never_written_is_carried_along(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model(num_hidden_layers=1)
    monkeypatch.setattr(
        type(model), "make_cache", lambda self: [KVCache(), KVCache(), RotatingKVCache(4)], raising=False
    )
    session, eager, ids = new_session(model), Eager(model), tokens(9)
    session.prefill([ids[:4]])
    eager.model(mx.array([ids[:4]]), cache=eager.caches)
    for token in ids[4:]:
        wanted = model(mx.array([[token]]), cache=eager.caches)[:, -1]
        assert distance(session.step([token]), wanted) == 0.0
    assert [len(arrays) for arrays in session.state] == [3, 0, 0]
    assert (session.trim(2), session.position, session.trace_count) == (2, 7, 1)


def test_a_cache_that_only_decode_writes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its state would appear in the middle of the text, and what it should hold of the prompt is not there."""
    model = tiny_model(num_hidden_layers=1)
    monkeypatch.setattr(type(model), "make_cache", lambda self: [KVCache(), KVCache()], raising=False)
    own = type(model).__call__

    def call(self: object, inputs: mx.array, cache: list[object]) -> mx.array:
        if inputs.shape[1] == 1:
            cache[1].update_and_fetch(mx.zeros((1, 2, 1, 8)), mx.zeros((1, 2, 1, 8)))  # type: ignore[attr-defined]
        return own(self, inputs, cache)

    monkeypatch.setattr(type(model), "__call__", call)
    session = new_session(model)
    session.prefill([tokens(4)])
    before = state_bytes(session)
    with pytest.raises(HostState, match="left unwritten is written in decode"):
        session.step([1])
    assert (session.position, state_bytes(session)) == (4, before)


def test_a_stack_in_which_nothing_is_written_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model(num_hidden_layers=1)
    own = type(model).__call__
    monkeypatch.setattr(
        type(model), "__call__", lambda self, inputs, cache=None: own(self, inputs, make_prompt_cache(self))
    )
    with pytest.raises(HostState, match="writes no cache"):
        new_session(model)


@pytest.mark.parametrize("lengths", [[3], [0, 3], [3, 10], [3, -1], [3, 4, 5], [1.5, 3], "ab"])
def test_lengths_that_do_not_fit_are_refused(lengths: object) -> None:
    session = new_session(batch_size=2)
    with pytest.raises(ShapeMismatch):
        session.prefill([tokens(9), tokens(9)], lengths=lengths)
    assert session.position == 0
