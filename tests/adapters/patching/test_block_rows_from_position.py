"""Block-sparse attention whose rows are the blocks of the queries."""

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

NAME, MASK = "block_rows_from_position", "mask_applied"
PHI3SMALL = source_of("phi3small")
BLOCK = 32
PROMPT, FOLLOWING = text(70), text(4, seed=4)


@pytest.mark.parametrize("order", [(NAME, MASK), (MASK, NAME)])
def test_steps_equal_eager_decoding_past_several_blocks(order: tuple[str, str]) -> None:
    patched = model_of("phi3small", *order)
    want = eager(patched, PROMPT, FOLLOWING)
    assert apart(compiled(patched, PROMPT, FOLLOWING), want) < 1e-5
    only_applied = model_of("phi3small", MASK)
    assert apart(compiled(only_applied, PROMPT, FOLLOWING), eager(only_applied, PROMPT, FOLLOWING)) > 1e-2


def test_a_row_with_padding_has_the_blocks_that_it_has_alone() -> None:
    patched = model_of("phi3small", NAME, MASK)
    prompts = [text(70), text(40, seed=5)]
    got = side_by_side(patched, prompts, FOLLOWING)
    for row, prompt in enumerate(prompts):
        assert apart([logits[row : row + 1] for logits in got], eager(patched, prompt, FOLLOWING)) < 1e-5


def test_eager_decoding_is_what_it_was_where_each_row_was_that_of_its_token() -> None:
    patched, own = model_of("phi3small", NAME), model_of("phi3small")
    for chunk in (1, BLOCK):
        prompt = PROMPT[: 2 * BLOCK]
        assert equal(eager(patched, prompt, FOLLOWING, chunk), eager(own, prompt, FOLLOWING, chunk))


def test_a_prompt_gives_what_its_tokens_give_one_by_one() -> None:
    patched = model_of("phi3small", NAME, MASK)
    alone = eager(model_of("phi3small"), PROMPT, FOLLOWING, chunk=1)
    assert apart(eager(patched, PROMPT, FOLLOWING), alone) < 1e-4
    # mlx-lm's own is neither causal within a prompt, nor are its rows those of its tokens.
    assert apart(eager(model_of("phi3small"), PROMPT, FOLLOWING), alone) > 1e-2


def test_a_second_time_nothing_is_left_to_mend() -> None:
    assert untouched(mended(PHI3SMALL, NAME), NAME)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("q_pos - k_pos < local_blocks", "q_pos - k_pos <= local_blocks"),
        ("self._block_sparse_mask(L, keys.shape[-2])", "self._block_sparse_mask(L, keys.shape[-2] + 1)"),
        ("        scores = queries @", "        self.last = block_mask\n        scores = queries @"),
        ("keys = self.rope(keys, offset=cache.offset)", "keys = self.rope(keys, offset=cache.offset + 1)"),
        ("queries, keys, values, scale=self.scale, mask=mask\n", "queries, keys, values, self.scale, mask\n"),
        ("values, scale, mask):", "values, scale, mask, window=None):"),
    ],
)
def test_what_is_not_understood_is_left_alone(old: str, new: str) -> None:
    assert old in PHI3SMALL
    assert untouched(PHI3SMALL.replace(old, new), NAME)
