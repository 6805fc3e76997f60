"""A record speaks of source files; a live model may run something else."""

from __future__ import annotations

from typing import Any

import mlx.nn as nn
import pytest
from mlx_lm.models import llama

from mlx_audit.evidence.live_code import foreign_code
from tiny_models import FAMILIES, tiny_model


class Rope(nn.Module):
    def __call__(self, x: Any, offset: Any = 0) -> Any:
        return x


@pytest.mark.parametrize("family", FAMILIES)
def test_models_as_mlx_lm_makes_them_are_known(family: str) -> None:
    assert foreign_code(tiny_model(family)) == []


def test_quantized_weights_and_low_rank_adapters_are_known() -> None:
    from mlx_lm.tuner.utils import linear_to_lora_layers

    model = tiny_model()
    nn.quantize(model, group_size=32, bits=4)
    linear_to_lora_layers(model, 2, {"rank": 4, "scale": 2.0, "dropout": 0.0})
    assert foreign_code(model) == []


def test_dropout_in_training_is_named() -> None:
    from mlx_lm.tuner.utils import linear_to_lora_layers

    model = tiny_model()
    linear_to_lora_layers(model, 1, {"rank": 4, "scale": 2.0, "dropout": 0.5})
    model.train()
    assert "model.eval()" in foreign_code(model)[0]
    model.eval()
    assert foreign_code(model) == []


def test_a_module_of_another_package_is_named() -> None:
    model = tiny_model()
    model.model.layers[1].self_attn.rope = Rope()
    (found,) = foreign_code(model)
    assert "model.layers.1.self_attn.rope is a" in found
    assert "Rope" in found


def test_a_function_in_the_place_of_a_module_is_named() -> None:
    model = tiny_model()
    model.model.layers[1].self_attn.rope = lambda x, offset=0: x
    assert "model.layers.1.self_attn.rope is" in foreign_code(model)[0]


def test_a_patched_class_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    own = llama.Attention.__call__
    monkeypatch.setattr(llama.Attention, "__call__", lambda self, *a, **k: own(self, *a, **k))
    assert foreign_code(tiny_model()) == [
        "mlx_lm.models.llama.Attention.__call__ comes from test_live_code.py"
    ]
