"""Token ids as bytes: what is taken, what is refused, and how much two keys share."""

from __future__ import annotations

from array import array
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_audit.errors import ShapeMismatch
from mlx_audit.prefix.radix_key import MOST, TokenKey, common_length, token_at

IDS = [0, 1, 255, 256, 70_000, MOST]
NEAR = st.lists(st.sampled_from([0, 1, 256, 257, MOST]), max_size=40)


@pytest.mark.parametrize(
    "tokens",
    [
        list(IDS),
        tuple(IDS),
        array("i", IDS),
        array("q", IDS),
        np.array(IDS),
        np.array(IDS, np.uint32),
        np.array([value for token in IDS for value in (token, 0)])[::2],
        [np.int64(token) for token in IDS],
        mx.array(IDS, mx.int32),
        mx.array(IDS, mx.uint32),
        TokenKey(IDS),
    ],
    ids=["list", "tuple", "i", "q", "numpy", "uint32", "strided", "scalars", "mlx", "mlx-uint32", "key"],
)
def test_ids_of_any_usual_type_are_packed_alike(tokens: Any) -> None:
    key = TokenKey(tokens)
    assert key.data == b"".join(token.to_bytes(4, "little") for token in IDS)
    assert list(key) == IDS
    assert (len(key), key, hash(key)) == (6, TokenKey(IDS), hash(TokenKey(IDS)))


@pytest.mark.parametrize("empty", [[], (), array("i"), np.array([], np.int32), TokenKey()])
def test_no_tokens_are_a_key_too(empty: Any) -> None:
    assert len(TokenKey(empty)) == 0


@pytest.mark.parametrize(
    ("tokens", "said"),
    [
        ([3, -1], "tokens[1]: a token id is out of range; found: -1"),
        ([MOST + 1], "tokens[0]: a token id is out of range; found: 2147483648"),
        ([2**70], "tokens[0]: a token id is out of range"),
        ([1, True], "tokens[1]: a token id is no integer; found: True"),
        ([1, 2.0], "tokens[1]: a token id is no integer; found: 2.0"),
        (["1"], "tokens[0]: a token id is no integer; found: '1'"),
        ([[1]], "tokens[0]: a token id is no integer; found: [1]"),
        ([None], "tokens[0]: a token id is no integer; found: None"),
        ([np.float32(1)], "tokens[0]: a token id is no integer"),
        ([np.bool_(True)], "tokens[0]: a token id is no integer"),
        ([np.int64(-5)], "tokens[0]: a token id is out of range"),
        (np.array([1, -1]), "tokens[1]: a token id is out of range; found: -1"),
        (np.array([1, 2**31]), "tokens[1]: a token id is out of range; found: 2147483648"),
        (np.array([2**64 - 1], np.uint64), "tokens[0]: a token id is out of range"),
        (np.array([1.0]), "token ids are no integers; found: dtype float64"),
        (np.array([True]), "token ids are no integers; found: dtype bool"),
        (np.array([[1]]), "axes than one; found: shape [1, 1]"),
        (np.array(1), "axes than one; found: shape []"),
        (array("f", [1.0]), "token ids are no integers"),
        (mx.array([1.0]), "token ids are no integers; found: dtype float32"),
        ("12", "text and raw bytes are no token ids; found: str"),
        (b"12", "text and raw bytes are no token ids; found: bytes"),
        (memoryview(b"12"), "text and raw bytes are no token ids; found: memoryview"),
        (7, "tokens are no list of ids; found: int"),
        (None, "tokens are no list of ids; found: NoneType"),
        ({1, 2}, "tokens are no list of ids; found: set"),
        (iter([1]), "tokens are no list of ids; found: list_iterator"),
    ],
    ids=lambda value: repr(value).partition(" at 0x")[0],  # the same on all workers
)
def test_what_is_no_token_id_is_refused(tokens: Any, said: str) -> None:
    with pytest.raises(ShapeMismatch) as refusal:
        TokenKey(tokens)
    assert said in str(refusal.value)
    assert "whole numbers from 0 to 2147483647" in str(refusal.value)


@given(before=NEAR, start=NEAR, one=NEAR, other=NEAR, cut=st.integers(0, 40))
def test_the_common_length_is_that_of_a_loop(
    before: list[int], start: list[int], one: list[int], other: list[int], cut: int
) -> None:
    edge, query = start + one, before + start + other
    limit = max(len(before), len(query) - cut)
    wanted = 0
    while (
        wanted < min(len(edge), limit - len(before)) and edge[wanted] == query[len(before) + wanted]
    ):  # one token at a time
        wanted += 1
    assert common_length(TokenKey(edge).data, TokenKey(query).data, 4 * len(before), 4 * limit) == 4 * wanted


@pytest.mark.parametrize("place", [0, 1, 4_095, 4_096, 4_097, 9_998, 9_999, 10_000])
def test_the_common_length_is_found_in_long_keys(place: int) -> None:
    ids = list(range(10_000))
    other = ids[:place] + [ids[place] ^ 256, *ids[place + 1 :]] if place < 10_000 else ids
    assert common_length(TokenKey(ids).data, TokenKey(other).data, 0, 40_000) == 4 * place


def test_a_key_is_shown_short() -> None:
    assert repr(TokenKey([5, 6])) == "TokenKey(5 6)"
    assert repr(TokenKey(list(range(100, 1_300)))).endswith("104 … 1299 (1,200 tokens))")
    assert token_at(TokenKey([1, MOST]).data, 4) == MOST
