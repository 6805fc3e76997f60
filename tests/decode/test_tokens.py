"""Tokens of a wrong shape, dtype or value are refused before anything is changed."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_audit.decode import CompiledDecodeSession
from mlx_audit.decode.tokens import token_array
from mlx_audit.errors import SessionMisuse, ShapeMismatch
from tiny_models import Eager, distance, shared_model, state_bytes, tokens

NO_IDS: list[Any] = [
    None,
    "1",
    ["1"],
    [None],
    [1.0],
    [float("nan")],
    [True],
    [np.bool_(False)],
    [2**70],
    [2**63],
    [-(2**70)],
    [1 + 0j],
    [b"1"],
    [[1], [2, 3]],
    [[]],
    [],
    {1},
    {"a": 1},
    object(),
    iter([1]),
    np.array([1.0]),
    np.array(["1"]),
    np.array([], np.int32),
    np.array([[]], np.int64),
    mx.array([1.0]),
    mx.array([1.0], mx.bfloat16),
    mx.array([True]),
    mx.array([], mx.int32),
    [-1],
    [64],
    [2**31],
    [2**32 + 1],
    np.array([-1], np.int8),
    np.array([255], np.uint8),
    mx.array([64], mx.uint32),
]


@pytest.mark.parametrize(
    "wrong", NO_IDS, ids=[f"{i}-{type(wrong).__name__}" for i, wrong in enumerate(NO_IDS)]
)
def test_nothing_that_is_no_id_gets_through(wrong: Any) -> None:
    session = CompiledDecodeSession(shared_model(), 20, evidence="ignore")
    session.prefill([tokens(3)])
    before = state_bytes(session)
    nested = [wrong] if isinstance(wrong, list) else wrong
    if isinstance(wrong, np.ndarray | mx.array) and wrong.ndim == 1:
        nested = wrong[None]
    calls = [
        lambda: session.step(wrong),
        lambda: session.extend(nested),
        lambda: session.generate(wrong, 2),
        lambda: CompiledDecodeSession(shared_model(), 20, evidence="ignore").prefill(nested),
    ]
    for call in calls:
        with pytest.raises(ShapeMismatch) as caught:
            call()
        assert caught.value.allowed
        assert "tokens" in str(caught.value.where)
    assert (session.position, session.trace_count, state_bytes(session)) == (3, 0, before)
    session.step([1])
    assert session.position == 4


def test_bools_among_integers_are_not_ids() -> None:
    with pytest.raises(ShapeMismatch):
        token_array([[True, 2]], shape=(1, None), vocabulary=64, call="extend")


@pytest.mark.parametrize(
    ("batch", "step", "extend"),
    [
        (1, [[1]], [1]),
        (1, 1, [[[1]]]),
        (1, [1, 2], [[1], [2]]),
        (2, [1], [[1]]),
        (2, [1, 2, 3], [[1], [2], [3]]),
        (2, [[1], [2]], [1, 2]),
        (2, [[1, 2]], [[1, 2]]),
    ],
)
def test_wrong_shapes_for_the_batch(batch: int, step: Any, extend: Any) -> None:
    session = CompiledDecodeSession(shared_model(), 20, batch_size=batch, evidence="ignore")
    session.prefill([tokens(3)] * batch)
    before = state_bytes(session)
    with pytest.raises(ShapeMismatch, match=rf"step\(tokens\): .*integers of shape \({batch},\)"):
        session.step(step)
    with pytest.raises(ShapeMismatch, match="L ≥ 1"):
        session.extend(extend)
    assert (session.position, state_bytes(session)) == (3, before)


@pytest.mark.parametrize(
    "ids",
    [
        [5, 63],
        (5, 63),
        np.array([5, 63], np.int8),
        np.array([5, 63], np.uint64),
        np.array([63, 5])[::-1],
        mx.array([5, 63]),
        mx.array([5, 63], mx.uint8),
        [mx.array(5), np.int64(63)],
    ],
    ids=["list", "tuple", "int8", "uint64", "strided", "mx", "mx-uint8", "list-of-arrays"],
)
def test_every_kind_of_integers_is_taken(ids: Any) -> None:
    session = CompiledDecodeSession(shared_model(), 20, batch_size=2, evidence="ignore")
    eager = Eager(shared_model())
    session.prefill([[1, 2], [3, 4]])
    eager.feed([[1, 2], [3, 4]])
    assert distance(session.step(ids), eager.feed([[5], [63]])) == 0.0
    array = token_array(ids, shape=(2, 1), vocabulary=64, call="step")
    assert (array.tolist(), array.dtype) == ([5, 63], mx.int32)


def test_calls_before_any_prefill_and_after_one() -> None:
    session = CompiledDecodeSession(shared_model(), 20, evidence="ignore")
    for call in (lambda: session.step([1]), lambda: session.extend([[1]]), lambda: session.state):
        with pytest.raises(SessionMisuse, match="prefill"):
            call()
    session.prefill([[1]])
    with pytest.raises(SessionMisuse, match="holds tokens already"):
        session.prefill([[1]])
    assert session.position == 1


WRONG_LENGTHS: list[Any] = [
    [0, 2],
    [2, 3],
    [-1, 2],
    [2**40, 2],
    [2],
    [2, 2, 2],
    [[1], [2]],
    [],
    2,
    "22",
    ["1", "2"],
    [2.5, 2],
    [2.0, 1.0],
    [True, 2],
    [None, 2],
    np.array([1.0, 2.0]),
    np.array([True, True]),
    mx.array([1.0, 2.0]),
    mx.array([1, 3]),
]


@pytest.mark.parametrize("wrong", WRONG_LENGTHS, ids=str)
def test_lengths_that_no_row_can_have_are_refused(wrong: Any) -> None:
    session = CompiledDecodeSession(shared_model(), 20, batch_size=2, evidence="ignore")
    with pytest.raises(ShapeMismatch) as caught:
        session.prefill([[1, 2], [3, 4]], lengths=wrong)
    assert "lengths" in str(caught.value.where)
    assert caught.value.allowed
    assert session.position == 0
    session.prefill([[1, 2], [3, 4]])
    assert session.position == 2


@pytest.mark.parametrize("lengths", [[2, 2], (1, 2), np.array([2, 1]), mx.array([1, 1])], ids=str)
def test_lengths_cut_rows_from_their_end(lengths: Any) -> None:
    rows, counts = [[1, 2], [3, 4]], [int(count) for count in lengths]
    session = CompiledDecodeSession(shared_model(), 20, batch_size=2, evidence="ignore")
    logits = [session.prefill(rows, lengths=lengths), session.step([5, 6])]
    assert session.position == max(counts) + 1
    for row, (count, token) in enumerate(zip(counts, (5, 6), strict=True)):
        eager = Eager(shared_model())
        for own, ids in zip(logits, (rows[row][:count], [token]), strict=True):
            assert distance(own[row : row + 1], eager.feed([ids])) < 1e-4


@pytest.mark.parametrize("n", [1.0, 0.5, True, "one", None, [1]])
def test_trim_takes_integers_only(n: Any) -> None:
    session = CompiledDecodeSession(shared_model(), 20, evidence="ignore")
    session.prefill([[1, 2, 3]])
    before = state_bytes(session)
    with pytest.raises(ShapeMismatch):
        session.trim(n)
    assert (session.position, state_bytes(session)) == (3, before)


@pytest.mark.parametrize("stop", [5, "text", [None], [[1]], [1.5]])
def test_stop_tokens_are_ids(stop: Any) -> None:
    session = CompiledDecodeSession(shared_model(), 20, evidence="ignore")
    with pytest.raises(ShapeMismatch, match="stop_tokens"):
        session.generate([1], 2, stop_tokens=stop)
