"""Dynamic NTK scaling of RoPE on arrays."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import pytest
from mlx_lm.models import rope_utils

from patched_families import (
    apart,
    compiled,
    eager,
    mended,
    model_from,
    model_of,
    side_by_side,
    source_of,
    text,
    untouched,
)

NAME = "dynamic_rope"
ROPES = Path(rope_utils.__file__).read_text()
LLAMA = source_of("llama").replace("from .rope_utils import initialize_rope\n", ROPES)
PROMPT, FOLLOWING = text(11), text(12, seed=4)
"""They go past the 16 positions from which on the base grows."""


def test_steps_equal_eager_decoding_where_they_could_not_be_traced(tmp_path: Path) -> None:
    patched, own = model_from("llama", mended(LLAMA, NAME), tmp_path), model_of("llama")
    with pytest.raises(Exception, match="Attempting to eval"):
        compiled(own, PROMPT, FOLLOWING)
    got = compiled(patched, PROMPT, FOLLOWING)
    assert apart(got, eager(patched, PROMPT, FOLLOWING)) < 1e-6
    assert apart(got, eager(own, PROMPT, FOLLOWING)) < 2e-5
    assert apart(got, eager(patched, PROMPT, FOLLOWING[::-1])) > 1e-2


def test_rows_of_different_length_have_bases_of_their_own(tmp_path: Path) -> None:
    patched = model_from("llama", mended(LLAMA, NAME), tmp_path)
    prompts = [text(14), text(9, seed=5)]
    got = side_by_side(patched, prompts, FOLLOWING)
    for row, prompt in enumerate(prompts):
        assert apart([logits[row : row + 1] for logits in got], eager(patched, prompt, FOLLOWING)) < 1e-5


@pytest.mark.parametrize("traditional", [True, False])
@pytest.mark.parametrize("offset", [0, 3, 15, 16, 40, 300])
def test_a_rotation_is_the_same_up_to_rounding(tmp_path: Path, offset: int, traditional: bool) -> None:
    namespace: dict[str, type] = {}
    exec(mended(ROPES, NAME), namespace)
    x = mx.random.normal((2, 3, 4, 16), key=mx.random.key(0))
    settings = (16, 16, traditional, 10000.0, 4.0)
    got = namespace["DynamicNTKScalingRoPE"](*settings)
    want = rope_utils.DynamicNTKScalingRoPE(*settings)(x, offset)
    assert mx.allclose(got(x, offset), want, atol=1e-4)
    assert mx.array_equal(got(x, mx.array(offset)), got(x, offset))
    assert mx.array_equal(got(x, mx.array([offset, offset])), got(x, offset))


def test_a_copy_that_branches_is_mended_with_where(tmp_path: Path) -> None:
    source = mended(source_of("internlm3"), NAME)
    assert "mx.where(" in source
    assert untouched(source, NAME)
    unpatched, patched = {}, {}
    for text_, names in ((source_of("internlm3"), unpatched), (source, patched)):
        exec(_class_alone(text_), names)
    x = mx.random.normal((1, 3, 4, 16), key=mx.random.key(0))
    for offset in (0, 5, 40):
        got, want = (
            names["DynamicNTKScalingRoPE"](16, 8, False, 10000, 2.0)(x, offset)
            for names in (patched, unpatched)
        )
        assert mx.allclose(got, want, atol=1e-4)


def test_nothing_is_left_to_mend_a_second_time() -> None:
    assert untouched(mended(ROPES, NAME), NAME)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("base=base,\n            scale=1.0,", "base=self.base,\n            scale=1.0,"),
        ("max(x.shape[-2] + offset,", "self.longest(x.shape[-2] + offset,"),
        ("max(x.shape[-2] + offset,", "max(len(x), x.shape[-2] + offset,"),
        ("max(x.shape[-2] + offset, self.max_position_embeddings)", "x.shape[-2] * offset"),
        ("        seq_len = max", "        if offset > 5:\n            return x\n        seq_len = max"),
    ],
)
def test_what_is_not_understood_is_left_alone(old: str, new: str) -> None:
    assert old in ROPES
    assert untouched(ROPES.replace(old, new), NAME)


OWN = """\
import mlx.core as mx
import mlx.nn as nn


class OwnRoPE(nn.Module):
    def __init__(self, limit=4096, factor=2):
        super().__init__()
        self.dims, self.limit, self.factor, self.base = 16, limit, factor, 10000

    def __call__(self, x, offset=0):
        seq_len = max(x.shape[-2] + offset, self.limit)
        ratio = self.factor * seq_len / self.limit - (self.factor - 1)
        base = self.base * ratio ** (self.dims / (self.dims - 2))
        return mx.fast.rope(x, self.dims, traditional=False, base=base, scale=1.0, offset=offset)
"""
CHOSEN = OWN.replace("max(x.shape[-2] + offset, self.limit)", "x.shape[-2] + offset").replace(
    """\
        base = self.base * ratio ** (self.dims / (self.dims - 2))
""",
    """\
        if seq_len > self.limit:
            base = self.base * ratio ** (self.dims / (self.dims - 2))
        else:
            base = self.base
""",
)


@pytest.mark.parametrize("source", [OWN, CHOSEN], ids=["larger", "chosen"])
@pytest.mark.parametrize("factor", [2, 4096])
def test_integers_of_a_configuration_do_not_wrap_around(source: str, factor: int) -> None:
    unpatched: dict[str, type] = {}
    patched: dict[str, type] = {}
    exec(source, unpatched)
    exec(mended(source, NAME), patched)
    x = mx.random.normal((1, 2, 1, 16), key=mx.random.key(0))
    for offset in (0, 4095, 4096, 600_000):
        # Far positions multiply the rounding of the base, so the lowest frequencies are compared.
        got, want = (names["OwnRoPE"](factor=factor)(x, offset) for names in (patched, unpatched))
        assert mx.allclose(got[..., [7, 15]], want[..., [7, 15]], atol=1e-2)


FORMULA = "base = self.base * ratio ** (self.dims / (self.dims - 2))"


@pytest.mark.parametrize(
    ("source", "old", "new"),
    [
        # The test reads what the branch sets.
        (
            OWN,
            FORMULA,
            "base = ratio\n        if base > 1:\n            base = base * 8\n        else:\n            base = 1.0",
        ),
        (CHOSEN, "if seq_len > self.limit:", "if ratio > 1:"),
        (CHOSEN, "if seq_len > self.limit:", "if seq_len > self.other:"),
        (CHOSEN, "            base = self.base\n", "            base = self.base * ratio\n"),
        (OWN, "ratio **", "(1 + seq_len * seq_len / (self.limit * self.limit)) **"),
        (OWN, FORMULA, "base = self.base * (seq_len // 64 + 1)"),
        (OWN, FORMULA, "base = self.base * seq_len"),
        (OWN, FORMULA, f"ratio = ratio * 2\n        {FORMULA}"),
        (OWN, FORMULA, f"{FORMULA}\n        x = x * ratio"),
        (OWN, FORMULA, f"{FORMULA}\n        offset = offset + 1"),
        (OWN, "scale=1.0", "scale=1 / ratio"),
        (
            OWN,
            "ratio = self.factor * seq_len / self.limit - (self.factor - 1)",
            "ratio = seq_len * seq_len / self.limit - (seq_len - 1)",
        ),
        (OWN, "self.limit)\n        ratio", "2 * offset)\n        ratio"),
    ],
)
def test_another_formula_is_left_alone(source: str, old: str, new: str) -> None:
    assert old in source
    assert not untouched(source, NAME)
    assert untouched(source.replace(old, new), NAME)


def _class_alone(source: str) -> str:
    """The rotation of a file, without the family around it."""
    start = source.find("def rope_with_base")
    start = start if start >= 0 else source.index("class DynamicNTK")
    imports = "import mlx.core as mx\nimport mlx.nn as nn\n\n"
    return imports + source[start : source.index("class Attention")]
