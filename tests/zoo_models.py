"""Tiny models of mlx-lm families with rings, recurrences, shared caches and learned positions."""

from __future__ import annotations

import functools
from typing import Any

import mlx.nn as nn

from mlx_audit.models.build import build_tiny, resolve_arguments
from tiny_models import SIZES, VOCABULARY, module_of

WINDOW = 6
_ALTERNATING = ["sliding_attention", "full_attention"]
_LAYERED = {"sliding_window": WINDOW, "head_dim": 8}

CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "llama": {**_LAYERED, "layer_types": _ALTERNATING * 2},
    "gpt2": {
        "n_ctx": 1000,
        "n_embd": 32,
        "n_head": 4,
        "n_layer": 4,
        "n_positions": 1000,
        "layer_norm_epsilon": 1e-5,
        "num_key_value_heads": 2,
    },
    "gpt_oss": {
        **_LAYERED,
        "layer_types": _ALTERNATING * 2,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    },
    "gemma3_text": {
        **_LAYERED,
        "sliding_window": 8,
        "sliding_window_pattern": 2,
        "query_pre_attn_scalar": 8,
        "num_key_value_heads": 1,
    },
    "gemma4_text": {
        **_LAYERED,
        "num_hidden_layers": 6,
        "global_head_dim": 16,
        "vocab_size_per_layer_input": VOCABULARY,
        "num_key_value_heads": 1,
        "num_kv_shared_layers": 2,
        "hidden_size_per_layer_input": 8,
        "partial_rotary_factor": 1.0,
        "sliding_window_pattern": 2,
        "enable_moe_block": False,
        "num_experts": None,
        "moe_intermediate_size": 32,
        "tie_word_embeddings": True,
    },
    "qwen3_next": {
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
        "full_attention_interval": 2,
    },
}

_GEMMA3N = {
    **SIZES,
    **_LAYERED,
    "model_type": "gemma3n_text",
    "num_hidden_layers": 6,
    "num_kv_shared_layers": 2,
    "vocab_size_per_layer_input": VOCABULARY,
    "rope_local_base_freq": 10000.0,
    "final_logit_softcapping": 30.0,
    "layer_types": _ALTERNATING * 3,
    "activation_sparsity_pattern": [0.95, 0.95, 0.0, 0.0, 0.0, 0.0],
    "hidden_size_per_layer_input": 8,
    "altup_num_inputs": 2,
    "altup_coef_clip": 120.0,
    "altup_correct_scale": True,
    "altup_active_idx": 0,
    "laurel_rank": 8,
}


@functools.cache
def zoo_model(family: str) -> nn.Module:
    """Return the tiny model of a family; all tests share it and leave it as it is."""
    module = module_of(family)
    own = {"text_config": _GEMMA3N} if family == "gemma3n" else {**SIZES, **CONFIGURATIONS[family]}
    return build_tiny(module, resolve_arguments(module, {"model_type": family, **own}), seed=0)
