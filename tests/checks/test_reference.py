"""The float64 reference is float64: NumPy, which shares no operation with it, comes to the same logits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from audited import healthy, mutated, new_subject
from mlx_audit.checks.reference import NoReference, error_against, first_rounding, float64_logits
from mlx_audit.checks.runs import eager_logits, teacher_tokens
from tiny_models import SIZES

Array = np.ndarray[Any, Any]


def numpy_logits(model: nn.Module, tokens: list[int]) -> Array:
    """Return llama's logits `[tokens, vocabulary]`, summed by NumPy in its own order."""
    weights = {name: np.array(value).astype(np.float64) for name, value in flat(model)}
    x = weights["model.embed_tokens.weight"][tokens]
    for layer in range(SIZES["num_hidden_layers"]):
        own = {
            k.removeprefix(f"model.layers.{layer}."): v for k, v in weights.items() if f"layers.{layer}." in k
        }
        x = x + attention(own, normed(x, own["input_layernorm.weight"]))
        h = normed(x, own["post_attention_layernorm.weight"])
        gate = h @ own["mlp.gate_proj.weight"].T
        x = (
            x
            + (gate / (1 + np.exp(-gate)) * (h @ own["mlp.up_proj.weight"].T)) @ own["mlp.down_proj.weight"].T
        )
    return normed(x, weights["model.norm.weight"]) @ weights["lm_head.weight"].T  # type: ignore[no-any-return]


def flat(model: nn.Module) -> list[tuple[str, mx.array]]:
    from mlx.utils import tree_flatten

    return tree_flatten(model.parameters())  # type: ignore[return-value]


def normed(x: Array, weight: Array) -> Array:
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + 1e-6) * weight  # type: ignore[no-any-return]


def rotated(x: Array) -> Array:
    """Rotate `[heads, tokens, 8]` by position."""
    angles = np.outer(np.arange(x.shape[1]), 10000.0 ** -(np.arange(4) / 4))
    first, second = x[..., :4], x[..., 4:]
    cos, sin = np.cos(angles), np.sin(angles)
    return np.concatenate([first * cos - second * sin, first * sin + second * cos], axis=-1)


def attention(own: dict[str, Array], h: Array) -> Array:
    def heads(name: str) -> Array:
        return (h @ own[f"self_attn.{name}_proj.weight"].T).reshape(len(h), -1, 8).transpose(1, 0, 2)

    queries, keys, values = (
        rotated(heads("q")),
        np.repeat(rotated(heads("k")), 2, 0),
        np.repeat(heads("v"), 2, 0),
    )
    scores = queries @ keys.transpose(0, 2, 1) / np.sqrt(8)
    scores = np.where(np.tril(np.ones(scores.shape[-2:], bool)), scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    mixed = (weights / weights.sum(-1, keepdims=True)) @ values
    return mixed.transpose(1, 0, 2).reshape(len(h), -1) @ own["self_attn.o_proj.weight"].T  # type: ignore[no-any-return]


def test_it_agrees_with_numpy_a_million_times_better_than_float32_does() -> None:
    subject = healthy()
    tokens = teacher_tokens(subject, 16)
    got = float64_logits(subject, tokens[:13], tokens[13:])
    wanted = numpy_logits(subject.model, tokens)[12:]
    errors = [
        np.max(np.abs(np.array(g)[0] - w)) / np.max(np.abs(w)) for g, w in zip(got, wanted, strict=True)
    ]
    assert max(errors) < 1e-12
    single = eager_logits(subject.model, tokens[:13], tokens[13:])
    assert all(1e-8 < error_against(g, w) < 1e-4 for g, w in zip(single, got, strict=True))


def test_a_cast_in_the_model_means_float64_too(tmp_path: Path) -> None:
    change = ("        return self.norm(h)\n", "        return self.norm(h.astype(mx.float32))\n")
    subject = new_subject(module=mutated(tmp_path, change))
    tokens = teacher_tokens(subject, 14)
    got = float64_logits(subject, tokens[:13], tokens[13:])
    wanted = numpy_logits(subject.model, tokens)[12:]
    assert max(np.max(np.abs(np.array(g)[0] - w)) for g, w in zip(got, wanted, strict=True)) < 1e-9


@pytest.mark.parametrize(
    ("code", "primitive"),
    [
        ("h.astype(mx.bfloat16)", "AsType"),
        ("h + 1e-3 * mx.erfinv(mx.tanh(h))", "ErfInv"),
        ("h + mx.sin(mx.arange(0.0, 1.0, 0.5))[0]", "Sin"),
    ],
)
def test_what_computes_in_less_is_named(code: str, primitive: str, tmp_path: Path) -> None:
    change = ("        return self.norm(h)\n", f"        return self.norm({code})\n")
    subject = new_subject(module=mutated(tmp_path, change))
    with pytest.raises(NoReference, match=f"{primitive} computes in a shorter dtype"):
        float64_logits(subject, [1, 2, 3], [])


def test_mlxs_own_operations_are_not_float64() -> None:
    """Why they are written out anew; where this fails, MLX has become better."""
    model = new_subject().tiny_model("float32")
    model.set_dtype(mx.float64)
    with mx.stream(mx.cpu):
        assert first_rounding(model, [1, 2, 3]) == "AsType"


def test_everything_is_put_back() -> None:
    before = (mx.float32, mx.exp, mx.fast.rms_norm, mx.gather_mm)
    float64_logits(healthy(), [1, 2, 3], [4])
    assert (mx.float32, mx.exp, mx.fast.rms_norm, mx.gather_mm) == before
    assert mx.float32 != mx.float64
