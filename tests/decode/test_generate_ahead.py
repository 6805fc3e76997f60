"""`generate` starts a step before the last token is read; nobody may see that, but for the clock."""

from __future__ import annotations

from collections.abc import Collection

import mlx.core as mx
import pytest

from mlx_audit.decode import CompiledDecodeSession
from tiny_models import tiny_model

PROMPT = [1, 2, 3, 4, 5]


def session() -> CompiledDecodeSession:
    return CompiledDecodeSession(tiny_model(), 64, evidence="ignore")


def step_by_step(count: int, stop: Collection[int] = ()) -> tuple[CompiledDecodeSession, list[int]]:
    one, tokens = session(), []
    logits = one.prefill([PROMPT])
    for index in range(count):
        token = int(mx.argmax(logits, -1).item())
        if token in stop:
            break
        tokens.append(token)
        if index + 1 < count:
            logits = one.step([token])
    return one, tokens


@pytest.mark.parametrize("stops", [False, True])
def test_tokens_position_and_what_follows_are_those_of_single_steps(stops: bool) -> None:
    _, tokens = step_by_step(20)
    stop = {tokens[-3]} if stops else set()
    wanted, tokens = step_by_step(20, stop)
    got = session()
    assert list(got.generate(PROMPT, 20, stop_tokens=stop)) == tokens
    assert (got.position, got.remaining) == (wanted.position, wanted.remaining)
    assert [cache.count() for cache in got.caches] == [cache.count() for cache in wanted.caches]
    assert mx.array_equal(got.step([3]), wanted.step([3]))


def test_a_session_is_at_the_last_token_yielded_whenever_it_is_used() -> None:
    _, tokens = step_by_step(20)
    one = session()
    stream = one.generate(PROMPT, 20)
    got = [next(stream) for _ in range(3)]
    assert one.position == 7
    copied = one.copy()
    assert (copied.position, {cache.count() for cache in copied.caches}) == (7, {7})
    assert list(copied.generate([got[-1]], 17)) == tokens[3:]
    assert got + list(stream) == tokens
    assert one.position == 24


def test_leaving_early_takes_the_step_back() -> None:
    one = session()
    stream = one.generate(PROMPT, 20)
    next(stream), next(stream)
    stream.close()
    assert (one.position, {cache.count() for cache in one.caches}) == (6, {6})


def test_two_streams_of_one_session_take_turns() -> None:
    one = session()
    first = one.generate(PROMPT, 8)
    token = next(first)
    second = one.generate([token], 4)
    next(second)
    assert one.position == 6
    next(first)
    assert one.position == 7
