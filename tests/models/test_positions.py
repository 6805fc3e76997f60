"""Tables of positions: found where they are, and a session does not go beyond them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest

from mlx_audit.errors import CapacityExceeded
from mlx_audit.models.positions import position_rows, require_rows
from tiny_models import tiny_model
from zoo_models import zoo_model


class Tables(nn.Module):
    def __init__(self, name: str, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(64, 8)
        setattr(self, name, mx.zeros(shape))


def rows(model: nn.Module, **arguments: Any) -> int | None:
    return position_rows(model, SimpleNamespace(**arguments))


@pytest.mark.parametrize(
    ("name", "shape", "found"),
    [
        ("_cos", (50, 4), 50),
        ("sin", (1, 50, 4), 50),
        ("wpe", (50, 8), 50),
        ("weight", (50, 8), None),
        ("_cos", (50,), None),
        ("_cos", (40, 50), None),
    ],
)
def test_tables_of_the_model_s_own_classes(name: str, shape: tuple[int, ...], found: int | None) -> None:
    assert rows(Tables(name, shape), max_position_embeddings=50, vocab_size=64) == found


def test_embeddings_and_nested_arguments() -> None:
    model = Tables("weight", (2, 2))
    assert rows(model, vocab_size=64) is None
    assert rows(model, text_config=SimpleNamespace(n_positions=64)) == 64
    assert rows(model, text_config={"n_ctx": 64}) == 64


def test_real_models() -> None:
    assert position_rows(tiny_model("llama"), tiny_model("llama").args) is None
    gpt2 = zoo_model("gpt2")
    assert position_rows(gpt2, gpt2.args) == 1000
    require_rows(gpt2, gpt2.args, 1000)
    with pytest.raises(
        CapacityExceeded, match="foreign memory; found: max_tokens=1001; allowed: at most 1000"
    ):
        require_rows(gpt2, gpt2.args, 1001)
