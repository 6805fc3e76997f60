"""Tiny models of every kind of cache, and cold runs of them: the oracle of every restore."""

from __future__ import annotations

import copy
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models.cache import make_prompt_cache

from mlx_audit.models.build import build_tiny, resolve_arguments
from mlx_audit.prefix.fingerprint import Fingerprint
from mlx_audit.prefix.reasons import PrefixRefused
from mlx_audit.prefix.snapshot import Snapshot
from mlx_audit.prefix.store import load
from tiny_models import SIZES, module_of, raw

WINDOW = 16
CHUNK = 8
VOCABULARY = 97
_SIZES = {**SIZES, "vocab_size": VOCABULARY}
_CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "llama": _SIZES,
    "gemma3_text": {
        **_SIZES,
        "head_dim": 8,
        "sliding_window": WINDOW,
        "sliding_window_pattern": 2,
        "query_pre_attn_scalar": 8,
    },
    "qwen3_next": {
        **_SIZES,
        "head_dim": 8,
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "linear_conv_kernel_dim": 4,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "decoder_sparse_step": 1,
        "shared_expert_intermediate_size": 32,
        "mlp_only_layers": [],
        "moe_intermediate_size": 32,
        "partial_rotary_factor": 0.5,
        "norm_topk_prob": True,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "full_attention_interval": 4,
    },
    "mamba2": {
        **_SIZES,
        "num_heads": 4,
        "head_dim": 16,
        "state_size": 16,
        "layer_norm_epsilon": 1e-5,
        "conv_kernel": 4,
        "n_groups": 1,
        "use_bias": False,
        "use_conv_bias": True,
        "tie_word_embeddings": False,
        "time_step_limit": [0.001, 100.0],
        "time_step_rank": 4,
    },
    "falcon_h1": {
        **_SIZES,
        "attention_bias": False,
        "embedding_multiplier": 1.0,
        "head_dim": 8,
        "mamba_chunk_size": 8,
        "mamba_d_conv": 4,
        "mamba_d_head": 8,
        "mamba_d_ssm": 32,
        "mamba_d_state": 16,
        "mamba_n_groups": 1,
        "mamba_n_heads": 4,
        "mlp_bias": False,
        "tie_word_embeddings": False,
    },
    "llama4": {
        "text_config": {
            **_SIZES,
            "model_type": "llama4_text",
            "attention_bias": False,
            "attention_chunk_size": CHUNK,
            "head_dim": 8,
            "interleave_moe_layer_step": 2,
            "intermediate_size_mlp": 64,
            "num_experts_per_tok": 1,
            "num_local_experts": 2,
            "rope_scaling": None,
            "use_qk_norm": True,
        }
    },
}
MODELS = tuple(_CONFIGURATIONS)
WORLD = Fingerprint(weights="tiny", tenant="test")
SUFFIXES = (1, 2, 15, 16, 17, WINDOW - 1, WINDOW, WINDOW + 1, CHUNK + 1)


def often(*families: str) -> list[Any]:
    """Return all families as parameters; those that are not named run nightly only."""
    return [
        family if family in families else pytest.param(family, marks=pytest.mark.nightly) for family in MODELS
    ]


@functools.cache
def subject(family: str) -> nn.Module:
    """Return the tiny model of a family; all tests share it and leave it as it is."""
    module = module_of(family)
    config = {"model_type": family, **_CONFIGURATIONS[family]}
    model = build_tiny(module, resolve_arguments(module, config), seed=0)
    # Private arrays, too: the first test that asks may run in a thread whose lazy arrays no other one can evaluate.
    mx.eval([value for part in model.modules() for value in part.values() if isinstance(value, mx.array)])
    return model


class Run:
    """An eager run on the model's own caches."""

    def __init__(self, model: nn.Module, caches: list[Any] | None = None, position: int = 0) -> None:
        self.model, self.position = model, position
        self.caches = make_prompt_cache(model) if caches is None else caches

    def feed(self, tokens: Sequence[int]) -> bytes:
        """Feed one chunk; return the bytes of the logits after each of its tokens."""
        logits = self.model(mx.array([list(tokens)]), cache=self.caches)
        mx.eval(logits)
        self.position += len(tokens)
        return raw(logits)

    def feed_all(self, chunks: Sequence[Sequence[int]]) -> Run:
        """Feed chunks in turn."""
        for chunk in chunks:
            self.feed(chunk)
        return self

    def twin(self) -> Run:
        """Return a run of its own at the same place, by Python's deep copy, not by a snapshot."""
        return Run(self.model, copy.deepcopy(self.caches), self.position)


def text(count: int, seed: int = 1) -> list[int]:
    """Return token ids, the same for the same seed; a longer text begins with the shorter one."""
    return [(seed * 31 + 7 * index * index + index) % VOCABULARY for index in range(count)]


def prefilled(family: str, length: int, decoded: int = 0, seed: int = 1) -> Run:
    """Return a cold run: the first tokens of `text` in one chunk, then some one by one."""
    tokens = text(length + decoded, seed)
    return Run(subject(family)).feed_all([tokens[:length], *([token] for token in tokens[length:])])


KEY = text(40)


def snapshot(family: str = "gemma3_text", length: int = 40) -> Snapshot:
    """Return a snapshot of `text(length)`, the last three tokens decoded."""
    return Snapshot.take(prefilled(family, length - 3, 3).caches, length)


def refused(folder: Path, world: Fingerprint = WORLD, **options: Any) -> PrefixRefused:
    """Load, and read every entry; return the refusal, before which nothing was handed out."""

    def read() -> None:
        for entry in load(folder, world, **options):
            entry.snapshot()

    with pytest.raises(PrefixRefused) as caught:
        read()
    return caught.value


def bodies(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))
