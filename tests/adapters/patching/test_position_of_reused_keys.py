"""Layers that attend to the keys of another layer's cache."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
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

NAME = "position_of_reused_keys"
AFM7 = source_of("afm7")
PROMPT, FOLLOWING = text(11), text(5, seed=4)


def test_steps_equal_eager_decoding(tmp_path: Path) -> None:
    patched, own = model_from("afm7", mended(AFM7, NAME), tmp_path), model_of("afm7")
    want = eager(own, PROMPT, FOLLOWING)
    assert equal(compiled(patched, PROMPT, FOLLOWING), want)
    assert apart(compiled(own, PROMPT, FOLLOWING), want) > 1e-2


def test_eager_decoding_is_what_it_was(tmp_path: Path) -> None:
    patched, own = model_from("afm7", mended(AFM7, NAME), tmp_path), model_of("afm7")
    for chunk in (0, 3, 1):
        assert equal(eager(patched, PROMPT, FOLLOWING, chunk), eager(own, PROMPT, FOLLOWING, chunk))
    assert equal([patched(mx.array([PROMPT]))], [own(mx.array([PROMPT]))])


def test_rows_of_different_length_have_positions_of_their_own(tmp_path: Path) -> None:
    patched = model_from("afm7", mended(AFM7, NAME), tmp_path)
    prompts = [text(11), text(4, seed=5)]
    got = side_by_side(patched, prompts, FOLLOWING)
    for row, prompt in enumerate(prompts):
        assert apart([logits[row : row + 1] for logits in got], eager(patched, prompt, FOLLOWING)) < 1e-5


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("        _, _, S, _ = keys.shape\n", "        S = keys.shape[2]\n"),
        ("offset=S - L", "offset=keys.shape[-2] - x.shape[1]"),
        ("_, _, S, _ = keys.shape", "B, _, S, _ = keys.shape"),
    ],
)
def test_the_same_length_is_found_in_other_words(tmp_path: Path, old: str, new: str) -> None:
    assert old in AFM7
    source = mended(AFM7.replace(old, new), NAME)
    patched = model_from("afm7", source, tmp_path)
    assert equal(eager(patched, PROMPT, FOLLOWING), eager(model_of("afm7"), PROMPT, FOLLOWING))
    assert "offset=offset" in source
    assert untouched(source, NAME)


def test_only_what_nothing_else_needs_is_removed() -> None:
    assert "S, _ = keys.shape" not in mended(AFM7, NAME)
    needed = AFM7.replace(
        "        queries = self.q_proj(x)\n", "        queries = self.q_proj(x) * (S > 0)\n"
    )
    assert "S, _ = keys.shape" in mended(needed, NAME)


def test_the_parameter_has_a_type_only_where_the_file_knows_it() -> None:
    assert "        offset: Any,\n" in mended(AFM7, NAME)
    untyped = AFM7.replace("Optional[Any]", "object").replace(
        "from typing import Any, Optional", "from typing import Optional"
    )
    assert "        offset,\n" in mended(untyped, NAME)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("offset=S - L", "offset=S - 1"),
        # Not the keys of the cache, or not all the tokens that it was given
        (
            "        _, _, S, _ = keys.shape",
            "        keys = mx.concatenate([self.sink, keys], axis=2)\n        _, _, S, _ = keys.shape",
        ),
        (
            "        for layer in self.kv_reuse_layers:",
            "        h = h[:, -1:]\n        for layer in self.kv_reuse_layers:",
        ),
        (
            "        for layer in self.kv_reuse_layers:",
            "        keys = keys[..., -8:, :]\n        for layer in self.kv_reuse_layers:",
        ),
        (
            "            h = layer(h, keys, values, mask)",
            "            h = layer(h[:, -1:], keys, values, mask)",
        ),
        (
            "self.self_attn(self.input_layernorm(x), keys",
            "self.self_attn(self.input_layernorm(x)[:, 1:], keys",
        ),
        ("        queries = self.q_proj(x)\n", "        x = x[:, -1:]\n        queries = self.q_proj(x)\n"),
        ("offset=S - L", "offset=L - S"),
        ("_, _, S, _ = keys.shape", "_, S, _, _ = keys.shape"),
        ("_, _, S, _ = keys.shape", "_, _, S, _ = keys.shape\n        S = S + 1"),
        ("keys, values = cache[-1].keys_and_values()", "keys, values = shared(cache)"),
        (
            "        for layer, c in zip(self.layers, cache):",
            "        h = self.first(h, cache)\n        for layer, c in zip(self.layers, cache):",
        ),
        (
            "            h = layer(h, keys, values, mask)",
            "            h = layer(h, keys=keys, values=values, mask=mask)",
        ),
        (
            "            h = layer(h, keys, values, mask)",
            "            h = self.called(layer, h, keys, values, mask)",
        ),
        (
            "        self.output_norm =",
            "        self.more = KVReuseTransformerBlock(args)\n        self.output_norm =",
        ),
        ("        h = self.embedding(inputs)", "        h, offset = self.embedding(inputs), 0"),
    ],
)
def test_nothing_is_changed_unless_the_whole_way_is_understood(old: str, new: str) -> None:
    assert old in AFM7
    assert untouched(AFM7.replace(old, new), NAME)
