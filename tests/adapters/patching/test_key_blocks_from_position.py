"""Key blocks chosen by the position."""

from __future__ import annotations

import pytest

from patched_families import (
    apart,
    compiled,
    eager,
    equal,
    mended,
    model_of,
    side_by_side,
    source_of,
    text,
    untouched,
)

NAME = "key_blocks_from_position"
MINIMAX = source_of("minimax_m3_vl")
PROMPT, FOLLOWING = text(21), text(12, seed=4)


def test_steps_equal_eager_decoding_once_blocks_are_dropped() -> None:
    own = model_of("minimax_m3_vl")
    assert apart(compiled(own, PROMPT, FOLLOWING), eager(own, PROMPT, FOLLOWING)) > 1e-2
    patched = model_of("minimax_m3_vl", NAME)
    for prompt in (PROMPT, PROMPT[:2]):
        assert apart(compiled(patched, prompt, FOLLOWING), eager(patched, prompt, FOLLOWING)) < 1e-5


def test_a_row_with_padding_chooses_what_it_would_alone() -> None:
    patched = model_of("minimax_m3_vl", NAME)
    prompts = [text(21), text(18, seed=5), text(3, seed=6)]
    got = side_by_side(patched, prompts, FOLLOWING)
    for row, prompt in enumerate(prompts):
        assert apart([logits[row : row + 1] for logits in got], eager(patched, prompt, FOLLOWING)) < 1e-5


@pytest.mark.parametrize("chunk", [0, 3, 1])
def test_eager_decoding_is_what_it_was(chunk: int) -> None:
    patched, own = model_of("minimax_m3_vl", NAME), model_of("minimax_m3_vl")
    assert equal(eager(patched, PROMPT, FOLLOWING, chunk), eager(own, PROMPT, FOLLOWING, chunk))


def test_a_second_time_nothing_is_left_to_mend() -> None:
    assert untouched(mended(MINIMAX, NAME), NAME)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("qpos = mx.arange(S - L, S)", "qpos = mx.arange(S - L, S) + 1"),
        ("block_scores = block_scores.max(axis=-1)", "block_scores = block_scores.mean(axis=-1)"),
        ("is_local, mx.inf, block_scores", "is_local, -mx.inf, block_scores"),
        ("k, v = kv_cache.update_and_fetch(k, v)", "k, v = kv_cache.update_and_fetch(k, 2 * v)"),
        ("kv_cache.keys = mx.depends(kv_cache.keys, index_kv)", "mx.eval(index_kv)"),
        ("mx.zeros((B, 1, L, 0), k.dtype)", "mx.zeros((B, 1, L, 1), k.dtype)"),
    ],
)
def test_what_is_not_understood_is_left_alone(old: str, new: str) -> None:
    assert old in MINIMAX
    assert untouched(MINIMAX.replace(old, new), NAME)
