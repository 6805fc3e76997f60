"""Tiny models from mlx-lm's own classes, and what eager mlx-lm makes of the same tokens: the oracle of many tests."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.cache import make_prompt_cache

from mlx_audit.models.build import build_tiny, resolve_arguments
from mlx_audit.models.modules import import_model

VOCABULARY = 64
FAMILIES = ("llama", "qwen2")
SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCABULARY,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 4096,
}


def config_of(family: str, **changes: Any) -> dict[str, Any]:
    """Return a tiny configuration, heads 8 wide."""
    return {"model_type": family, "tie_word_embeddings": family == "qwen2", **SIZES, **changes}


def module_of(family: str) -> ModuleType:
    """Return mlx-lm's module of a family."""
    return import_model(f"mlx_lm.models.{family}")


def tiny_model(family: str = "llama", *, seed: int = 0, dtype: str = "float32", **changes: Any) -> nn.Module:
    """Return a new tiny model; the weights depend on the seed alone, and matrices are scaled so that tokens vary."""
    module = module_of(family)
    arguments = resolve_arguments(module, config_of(family, **changes))
    return build_tiny(module, arguments, seed=seed, dtype=dtype)


@functools.cache
def shared_model(family: str = "llama") -> nn.Module:
    """Return one model for all tests that leave it as it is."""
    return tiny_model(family)


def tokens(count: int, seed: int = 1) -> list[int]:
    """Return random token ids, the same for the same seed."""
    return [int(token) for token in np.random.default_rng(seed).integers(0, VOCABULARY, count)]


class Eager:
    """Eager mlx-lm with the model's own caches, fed the same tokens in the same chunks."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.caches = make_prompt_cache(model)

    def feed(self, rows: Sequence[Sequence[int]]) -> mx.array:
        """Return logits `[B, vocabulary]` after the last token of each row."""
        logits = self.model(mx.array(rows), cache=self.caches)[:, -1]
        mx.eval(logits, [cache.state[:2] for cache in self.caches])
        return logits


def cold_logits(model: nn.Module, rows: Sequence[Sequence[int]]) -> mx.array:
    """Return logits after the last token, everything recomputed in one call."""
    return Eager(model).feed(rows)


def distance(left: mx.array, right: mx.array) -> float:
    """Return the largest absolute difference of two arrays of one shape."""
    assert left.shape == right.shape
    return float(mx.abs(left.astype(mx.float32) - right.astype(mx.float32)).max())


def raw(array: mx.array) -> bytes:
    """Return the bytes of an array of any dtype."""
    plain = mx.view(array, mx.uint16) if array.dtype == mx.bfloat16 else array
    return np.array(plain).tobytes()


def state_bytes(session: Any) -> list[list[bytes]] | None:
    """Return the bytes of every state array of a session, or None before any prefill."""
    if session.position == 0:
        return None
    return [[raw(array) for array in arrays] for arrays in session.state]
