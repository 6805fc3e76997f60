"""Options: mlx-lm's own words, and contradictions refused before any work."""

from __future__ import annotations

import inspect
from typing import Any, get_args

import mlx.core as mx
import pytest
from mlx_lm.convert import MODEL_CONVERSION_DTYPES, QUANT_RECIPES, convert

from mlx_audit.convert.options import _SIZES, ConvertOptions, Dtype, Mode, Recipe
from mlx_audit.errors import MlxAuditError


def test_the_words_are_those_of_mlx_lm() -> None:
    assert set(ConvertOptions.model_fields) <= set(inspect.signature(convert).parameters)
    assert sorted(get_args(Recipe)) == sorted(QUANT_RECIPES)
    assert sorted(get_args(Dtype)) == sorted(MODEL_CONVERSION_DTYPES)


@pytest.mark.parametrize("mode", get_args(Mode))
def test_the_sizes_are_those_that_mlx_quantizes_to(mode: str) -> None:
    bits, groups = _SIZES[mode]
    weights = mx.random.normal((2, 128))
    for size in bits:
        for group in groups:
            packed = mx.quantize(weights, group_size=group, bits=size, mode=mode)
            mx.eval(packed)
            stored = sum(part.nbytes for part in packed)
            options = ConvertOptions(quantize=True, q_mode=mode, q_bits=size, q_group_size=group)  # type: ignore[arg-type]
            # Scales and biases here are float32; the estimate takes half precision.
            assert stored * 8 / weights.size >= options.bits_per_weight
            options.require_sound()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"quantize": True, "dequantize": True}, "do not go together"),
        ({"q_bits": 4}, "--q-bits needs --quantize"),
        ({"q_group_size": 32}, "--q-group-size needs --quantize"),
        ({"q_mode": "mxfp4"}, "--q-mode needs --quantize"),
        ({"quant_predicate": "mixed_2_6"}, "--quant-predicate needs --quantize"),
        ({"quantize": True, "quant_predicate": "mixed_2_6", "q_bits": 4}, "chooses the bits"),
        ({"quantize": True, "q_bits": 7}, "has no such size"),
        ({"quantize": True, "q_group_size": 16}, "has no such size"),
        ({"quantize": True, "q_mode": "mxfp4", "q_bits": 8}, "has no such size"),
    ],
    ids=lambda value: None if isinstance(value, dict) else value,
)
def test_contradictions(values: dict[str, Any], message: str) -> None:
    with pytest.raises(MlxAuditError, match=message):
        ConvertOptions(**values).require_sound()
