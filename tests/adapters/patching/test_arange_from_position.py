"""Position ids as array arithmetic."""

from __future__ import annotations

from pathlib import Path

import pytest
from mlx_lm.models.cache import make_prompt_cache

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

NAME = "arange_from_position"
BIGCODE = source_of("gpt_bigcode")
RANGE = "np.arange(cache[0].offset, cache[0].offset + L)"
PROMPT, FOLLOWING = text(11), text(5, seed=4)


def test_steps_equal_eager_decoding_where_they_could_not_be_traced(tmp_path: Path) -> None:
    patched, own = model_from("gpt_bigcode", mended(BIGCODE, NAME), tmp_path), model_of("gpt_bigcode")
    with pytest.raises(Exception, match="Attempting to eval"):
        compiled(own, PROMPT, FOLLOWING)
    want = eager(own, PROMPT, FOLLOWING)
    assert equal(eager(patched, PROMPT, FOLLOWING), want)
    assert equal(compiled(patched, PROMPT, FOLLOWING), want)


def test_rows_of_different_length_have_positions_of_their_own(tmp_path: Path) -> None:
    patched = model_from("gpt_bigcode", mended(BIGCODE, NAME), tmp_path)
    prompts = [text(11), text(4, seed=5)]
    got = side_by_side(patched, prompts, FOLLOWING)
    for row, prompt in enumerate(prompts):
        assert apart([logits[row : row + 1] for logits in got], eager(patched, prompt, FOLLOWING)) < 1e-5
    assert make_prompt_cache(patched)[0].offset == 0


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (RANGE, "np.arange(cache[0].offset, L + cache[0].offset)"),
        (RANGE, "np.arange(cache[0].offset, cache[0].offset + L, dtype=np.int32)"),
        (RANGE, "mx.arange(cache[0].offset, cache[0].offset + inputs.shape[1])"),
        (f"mx.array({RANGE})", RANGE),
        (
            f"            position_ids = mx.array({RANGE})",
            "            start = cache[0].offset\n            position_ids = mx.array(np.arange(start, start + L))",
        ),
        (f"mx.array({RANGE})", f"mx.array({RANGE}, dtype=mx.int32)"),
    ],
)
def test_the_same_range_is_found_in_other_words(tmp_path: Path, old: str, new: str) -> None:
    assert old in BIGCODE
    source = BIGCODE.replace(old, new)
    assert not untouched(source, NAME)
    patched = model_from("gpt_bigcode", mended(source, NAME), tmp_path)
    assert equal(eager(patched, PROMPT, FOLLOWING), eager(model_of("gpt_bigcode"), PROMPT, FOLLOWING))
    assert "..., None]" in mended(source, NAME)
    assert untouched(mended(source, NAME), NAME)


def test_bounds_that_have_names_are_followed() -> None:
    named = "            start = cache[0].offset\n            end = start + L\n"
    lines = f"            position_ids = mx.array({RANGE})"
    source = BIGCODE.replace(lines, f"{named}            position_ids = mx.array(np.arange(start, end))")
    assert "position_ids = mx.arange(L) + mx.array(start)[..., None]" in mended(source, NAME)


def test_hidden_states_may_be_scaled_by_ids() -> None:
    scale = "(1 + 0.1 * mx.log(1 + position_ids / 8))[..., None].astype(hidden_states.dtype)"
    source = BIGCODE.replace(
        "hidden_states += self.wpe(position_ids)", f"hidden_states = hidden_states * {scale}"
    )
    assert "np.arange(cache" not in mended(source, NAME)
    assert untouched(source.replace(scale, scale.replace("[..., None]", "[:, None]")), NAME)
    assert untouched(source.replace(f"hidden_states * {scale}", f"self.queries * {scale}"), NAME)


@pytest.mark.parametrize(
    ("range_", "type_"),
    [
        (f"mx.array({RANGE})", "int64"),
        (f"mx.array({RANGE[:-1]}, dtype=np.uint32))", "uint32"),
        (f"mx.array({RANGE[:-1]}, dtype=np.int32))", ""),
        (f"mx.array({RANGE}, dtype=mx.int32)", ""),
        (f"mx.array({RANGE}, mx.uint64)", "uint64"),
        ("mx.arange(cache[0].offset, cache[0].offset + L, dtype=mx.int64)", "int64"),
        ("mx.arange(cache[0].offset, cache[0].offset + L)", ""),
    ],
)
def test_ids_that_are_computed_with_keep_their_type(tmp_path: Path, range_: str, type_: str) -> None:
    source = BIGCODE.replace(f"mx.array({RANGE})", range_).replace(
        "hidden_states += self.wpe(position_ids)",
        "buckets = position_ids * self.multiplier % self.buckets\n        hidden_states += self.wpe(buckets)",
    )
    source = source.replace(
        "self.wpe = ", "self.multiplier, self.buckets = 1_000_000_007, 61\n        self.wpe = "
    )
    patched = mended(source, NAME)
    assert not untouched(source, NAME)
    assert (f".astype(mx.{type_})" in patched) if type_ else (".astype(" not in patched)
    got, want = (
        eager(model_from("gpt_bigcode", each, tmp_path), PROMPT, FOLLOWING) for each in (patched, source)
    )
    assert equal(got, want)


@pytest.mark.parametrize("use", ["self.wpe(position_ids * 2)", "self.wpe(mx.array(position_ids / 8))"])
def test_arithmetic_of_numpy_is_left_alone(use: str) -> None:
    source = BIGCODE.replace(f"mx.array({RANGE})", RANGE).replace("self.wpe(position_ids)", use)
    assert untouched(source, NAME)


@pytest.mark.parametrize(
    "line", ["position_ids = position_ids * 2", "twice = position_ids * 2\n        position_ids = twice * 1"]
)
def test_ids_that_are_set_anew_are_left_alone(line: str) -> None:
    wpe = "        hidden_states += self.wpe(position_ids)\n"
    assert untouched(BIGCODE.replace(wpe, f"        {line}\n{wpe}"), NAME)


@pytest.mark.parametrize(
    "new",
    [
        "np.arange(cache[0].offset, cache[0].offset + L, 2)",
        "np.arange(cache[0].offset + 1, cache[0].offset + L)",
        "np.arange(cache[0].offset, L)",
        "np.arange(L, L + L)",
        "np.arange(cache[0].offset, cache[0].offset + L, dtype=np.float32)",
        "np.arange(cache[0].offset, cache[0].offset + cache[0].offset)",
    ],
)
def test_another_range_is_left_alone(new: str) -> None:
    assert untouched(BIGCODE.replace(RANGE, new), NAME)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("self.wpe(position_ids)", "self.wpe(position_ids)[None]"),
        ("self.wpe(position_ids)", "self.wpe(position_ids[:, None])"),
        ("self.wpe = nn.Embedding(args.n_positions, args.n_embd)", "self.wpe = Rotation(args)"),
        ("hidden_states += self.wpe(position_ids)", "hidden_states = self.wpe(position_ids)"),
        (
            "mask = create_attention_mask(hidden_states, cache[0])",
            "mask = position_ids[:, None] >= position_ids[None]",
        ),
        ("layer(hidden_states, mask, cache=c)", "layer(hidden_states, mask, position_ids, cache=c)"),
        ("        mask = create", "        position_ids += 2\n        mask = create"),
    ],
)
def test_ids_whose_rank_matters_are_left_alone(old: str, new: str) -> None:
    assert old in BIGCODE
    assert untouched(BIGCODE.replace(old, new), NAME)


def test_a_bound_that_was_taken_before_the_start_moved_is_left_alone() -> None:
    lines = f"            position_ids = mx.array({RANGE})"
    for moved in ("start += 1", "start = start + 1"):
        new = (
            f"            start = cache[0].offset\n            end = start + L\n            {moved}\n"
            "            position_ids = mx.array(np.arange(start, end))"
        )
        assert untouched(BIGCODE.replace(lines, new), NAME)


def test_numpy_is_imported_as_long_as_something_needs_it() -> None:
    assert "import numpy as np" in mended(BIGCODE, NAME)
    source = BIGCODE.replace("mx.array(np.arange(L))", "mx.arange(L)")
    assert "numpy" not in mended(source, NAME)
    assert "np." not in mended(source, NAME)
