"""The scale of queries by their position."""

from __future__ import annotations

import pytest

from patched_families import compiled, eager, equal, mended, model_of, source_of, text, untouched

NAME = "temperature_from_position"
LLAMA4 = source_of("llama4")
PROMPT, FOLLOWING = text(13), text(14, seed=4)

SCALE = """\
import mlx.core as mx


class Attention:
    def __call__(self, x, cache=None):
        B, L, _ = x.shape
        q = self.q_proj(x).reshape(B, L, 4, -1).transpose(0, 2, 1, 3)
        start = cache.offset

        # Later queries count for more.
        scale = 0.1 * mx.log(mx.arange(start + 1, start + L + 1))
        scale = scale[:, None]
        q = q * scale
        return q
"""


def test_without_it_no_step_is_compiled() -> None:
    with pytest.raises(TypeError, match="arange"):
        compiled(model_of("llama4", "chunk_mask_from_cache"), PROMPT, FOLLOWING)


@pytest.mark.parametrize("chunk", [0, 3, 1])
def test_eager_decoding_is_what_it_was(chunk: int) -> None:
    patched, own = model_of("llama4", NAME), model_of("llama4")
    assert equal(eager(patched, PROMPT, FOLLOWING, chunk), eager(own, PROMPT, FOLLOWING, chunk))


def test_the_same_scale_is_mended_elsewhere() -> None:
    assert mended(SCALE, NAME) == SCALE.replace(
        """\
        scale = 0.1 * mx.log(mx.arange(start + 1, start + L + 1))
        scale = scale[:, None]
""",
        """\
        positions = mx.arange(1, L + 1) + mx.array(start)[..., None]
        scale = 0.1 * mx.log(positions)
        scale = scale[..., None, :, None]
""",
    )


@pytest.mark.parametrize("source", [LLAMA4, SCALE], ids=["llama4", "elsewhere"])
def test_a_second_time_nothing_is_left_to_mend(source: str) -> None:
    assert untouched(mended(source, NAME), NAME)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("start + L + 1)", "start + L + 2)"),  # another length
        ("mx.log(", "mx.cumsum("),  # not number by number
        ("0.1 * mx", "weights * mx"),
        ("scale[:, None]", "scale[None]"),
        ("        q = q * scale\n", "        q = q * scale\n        x = x * scale\n"),  # not of heads alone
        ("        q = q * scale\n", "        q = q @ scale\n"),
        (".transpose(0, 2, 1, 3)", ""),
        ("start = cache.offset", "start = cache.offset + 1"),
        ("start = cache.offset", "start = cache.start_position"),
    ],
)
def test_what_is_not_understood_is_left_alone(old: str, new: str) -> None:
    assert old in SCALE
    assert untouched(SCALE.replace(old, new), NAME)
