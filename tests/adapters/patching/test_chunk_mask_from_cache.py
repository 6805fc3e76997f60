"""The mask within chunks, asked from the cache."""

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

NAME = "chunk_mask_from_cache"
BOTH = (NAME, "temperature_from_position")
LLAMA4 = source_of("llama4")
PROMPT, FOLLOWING = text(13), text(14, seed=4)

MASK = """\
import mlx.core as mx


class Stack:
    def __call__(self, x, cache=None):
        if cache is not None:
            first = cache[0].start_position
            now = cache[0].offset
        else:
            first = 0
            now = 0
        keys = mx.arange(first, now + x.shape[1])
        queries = mx.arange(now, now + x.shape[1])[:, None]
        mask = (keys // self.size == queries // self.size) & (keys <= queries)
        for layer in self.layers:
            x = layer(x, mask)
        return x
"""


def test_steps_equal_eager_decoding_past_several_chunks() -> None:
    with pytest.raises(TypeError, match="arange"):
        compiled(model_of("llama4", BOTH[1]), PROMPT, FOLLOWING)
    patched = model_of("llama4", *BOTH)
    assert apart(compiled(patched, PROMPT, FOLLOWING), eager(patched, PROMPT, FOLLOWING)) < 1e-5


def test_rows_of_different_length_have_chunks_of_their_own() -> None:
    patched = model_of("llama4", *BOTH)
    prompts = [text(13), text(6, seed=5)]
    got = side_by_side(patched, prompts, FOLLOWING)
    for row, prompt in enumerate(prompts):
        assert apart([logits[row : row + 1] for logits in got], eager(patched, prompt, FOLLOWING)) < 1e-5


@pytest.mark.parametrize("chunk", [0, 3, 1])
def test_eager_decoding_is_what_it_was(chunk: int) -> None:
    patched, own = model_of("llama4", NAME), model_of("llama4")
    assert equal(eager(patched, PROMPT, FOLLOWING, chunk), eager(own, PROMPT, FOLLOWING, chunk))


def test_the_same_mask_is_mended_elsewhere() -> None:
    assert mended(MASK, NAME) == MASK.replace(
        """\
        keys = mx.arange(first, now + x.shape[1])
        queries = mx.arange(now, now + x.shape[1])[:, None]
        mask = (keys // self.size == queries // self.size) & (keys <= queries)
""",
        """\
        if cache is not None and hasattr(cache[0], "make_mask"):
            # The keys that it returns are its own matter
            mask = cache[0].make_mask(x.shape[1])
        else:
            keys = mx.arange(first, now + x.shape[1])
            queries = mx.arange(now, now + x.shape[1])[:, None]
            mask = (keys // self.size == queries // self.size) & (keys <= queries)
""",
    )


@pytest.mark.parametrize("source", [LLAMA4, MASK], ids=["llama4", "elsewhere"])
def test_a_second_time_nothing_is_left_to_mend(source: str) -> None:
    assert untouched(mended(source, NAME), NAME)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("queries // self.size)", "queries // self.other)"),  # chunks of two sizes
        ("(keys <= queries)", "(keys < queries)"),  # another mask
        (") & (", ") | ("),
        ("mx.arange(now, now + x.shape[1])[:, None]", "mx.arange(now, now + x.shape[1])[None]"),
        ("            now = 0\n", "            now = 1\n"),
        ("layer(x, mask)", "layer(x, mask, keys)"),  # read afterwards
        ("layer(x, mask)", "layer(x, mask, now)"),
        ("first = cache[0].start_position", "first = cache[1].start_position"),  # of two caches
        # What is asked is set anew
        ("            first = cache[0]", "            cache = cache[::-1]\n            first = cache[0]"),
        # A cache of the file's own may have a mask of another kind to give
        ("class Stack:", "class Own(KVCache):\n    start_position = 0\n\n\nclass Stack:"),
        (
            "class Stack:",
            "class Own(KVCache):\n    def __init__(self):\n        self.start_position = 0\n\n\nclass Stack:",
        ),
    ],
)
def test_what_is_not_understood_is_left_alone(old: str, new: str) -> None:
    assert old in MASK
    assert untouched(MASK.replace(old, new), NAME)
