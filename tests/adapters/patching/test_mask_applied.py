"""Masks that hide scores."""

from __future__ import annotations

import sys
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import pytest

from patched_families import (
    apart,
    compiled,
    eager,
    equal,
    mended,
    model_from,
    model_of,
    side_by_side,
    source_of,
    text,
    untouched,
)

NAME = "mask_applied"
PROMPT, FOLLOWING = text(11), text(5, seed=4)


@pytest.fixture
def olmo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """mlx-lm's olmo, which needs a package of another project only to be there."""
    (tmp_path / "hf_olmo").mkdir()
    (tmp_path / "hf_olmo" / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    source = source_of("olmo")
    sys.modules.pop("hf_olmo", None)
    return source


def test_steps_equal_eager_decoding(olmo: str, tmp_path: Path) -> None:
    patched = model_from("olmo", mended(olmo, NAME), tmp_path)
    want = eager(patched, PROMPT, FOLLOWING)
    assert equal(compiled(patched, PROMPT, FOLLOWING), want)
    only_arrays = mended(olmo, NAME).replace("mask.dtype == mx.bool_", "False")
    assert apart(compiled(model_from("olmo", only_arrays, tmp_path), PROMPT, FOLLOWING), want) > 1e-2


def test_eager_decoding_of_single_tokens_is_what_it_was_and_prompts_can_be_read(
    olmo: str, tmp_path: Path
) -> None:
    patched, own = model_from("olmo", mended(olmo, NAME), tmp_path), model_of("olmo")
    alone = eager(own, PROMPT, FOLLOWING, chunk=1)
    assert equal(eager(patched, PROMPT, FOLLOWING, chunk=1), alone)
    with pytest.raises(ValueError, match="str"):
        eager(own, PROMPT, FOLLOWING)
    assert apart(eager(patched, PROMPT, FOLLOWING), alone) < 1e-5
    assert apart([patched(mx.array([PROMPT]))[:, -1]], alone[:1]) < 1e-5


def test_rows_of_different_length_do_not_see_their_padding(olmo: str, tmp_path: Path) -> None:
    patched = model_from("olmo", mended(olmo, NAME), tmp_path)
    prompts = [text(11), text(4, seed=5)]
    got = side_by_side(patched, prompts, FOLLOWING)
    for row, prompt in enumerate(prompts):
        assert apart([logits[row : row + 1] for logits in got], eager(patched, prompt, FOLLOWING)) < 1e-5


def test_masks_of_floats_are_added_as_before(olmo: str, tmp_path: Path) -> None:
    patched, own = model_from("olmo", mended(olmo, NAME), tmp_path), model_of("olmo")
    hidden = mx.random.normal((1, 6, 32), key=mx.random.key(0))
    mask = nn.MultiHeadAttention.create_additive_causal_mask(6)
    for model in (patched, own):
        model.block = model.layers[0]
    assert equal([patched.block(hidden, mask)], [own.block(hidden, mask)])


@pytest.mark.parametrize("new", ["scores = scores + mask", "scores = mask + scores"])
def test_the_same_sum_is_found_in_other_words(olmo: str, tmp_path: Path, new: str) -> None:
    source = mended(olmo.replace("scores += mask", new), NAME)
    want = eager(model_from("olmo", mended(olmo, NAME), tmp_path), PROMPT, FOLLOWING)
    assert equal(eager(model_from("olmo", source, tmp_path), PROMPT, FOLLOWING), want)
    assert untouched(source, NAME)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("scores += mask", "scores += bias"),
        ("mx.softmax(scores", "mx.sigmoid(scores"),
        ("scores += mask", "if mask.dtype != mx.bool_:\n                scores += mask"),
        ("scores += mask", "scores -= mask"),
    ],
)
def test_what_is_no_mask_or_already_applied_is_left_alone(olmo: str, old: str, new: str) -> None:
    assert old in olmo
    assert untouched(olmo.replace(old, new), NAME)


def test_grouped_queries_give_the_mask_of_a_batch_an_axis() -> None:
    source = mended(source_of("phi3small"), NAME)
    assert "if 3 < mask.ndim < scores.ndim:" in source
    assert untouched(source, NAME)
    assert all(untouched(source_of(family), NAME) for family in ("gemma2", "gear"))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (
            "            scores = scores + mask\n",
            "            scores = scores + mask\n            values = values * mask\n",
        ),
        ("mx.softmax(scores", "mx.softmax(scores_of_blocks"),
    ],
)
def test_what_else_reads_the_mask_does_not_see_its_axis(old: str, new: str) -> None:
    phi = source_of("phi3small")
    assert old in phi
    assert untouched(phi.replace(old, new), NAME)
