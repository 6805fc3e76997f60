"""Tiny models of families that no fixed-capacity cache serves as they are: unpatched, and with some codemods."""

from __future__ import annotations

import functools
import json
import tempfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import libcst as cst
import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.cache import make_prompt_cache

from mlx_audit.adapters.patching import codemods
from mlx_audit.decode import CompiledDecodeSession
from mlx_audit.models.build import build_tiny, resolve_arguments
from mlx_audit.models.modules import import_file
from tiny_models import module_of

CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "llama4": {
        "model_type": "llama4",
        "text_config": {
            "attention_bias": False,
            "attention_chunk_size": 8,
            "head_dim": 8,
            "hidden_size": 32,
            "interleave_moe_layer_step": 2,
            "intermediate_size": 32,
            "intermediate_size_mlp": 32,
            "max_position_embeddings": 1000,
            "model_type": "llama4_text",
            "num_attention_heads": 4,
            "num_experts_per_tok": 1,
            "num_hidden_layers": 4,
            "num_key_value_heads": 2,
            "num_local_experts": 4,
            "rms_norm_eps": 1e-5,
            "rope_scaling": None,
            "rope_theta": 10000.0,
            "use_qk_norm": True,
            "vocab_size": 64,
            "floor_scale": 4,
        },
    },
    "gpt_bigcode": {
        "model_type": "gpt_bigcode",
        "n_embd": 32,
        "n_layer": 2,
        "n_inner": 32,
        "n_head": 4,
        "n_positions": 256,
        "layer_norm_epsilon": 1e-5,
        "vocab_size": 64,
    },
    "olmo": {
        "model_type": "olmo",
        "d_model": 32,
        "n_layers": 2,
        "mlp_hidden_size": 32,
        "n_heads": 4,
        "vocab_size": 64,
        "embedding_size": 64,
    },
    "afm7": {
        "model_type": "afm7",
        "vocab_size": 64,
        "hidden_dim": 32,
        "num_layers": 3,
        "num_kv_reuse_layers": 1,
        "num_heads": 4,
        "num_kv_heads": 2,
    },
    "llama": {
        "model_type": "llama",
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "intermediate_size": 32,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-5,
        "vocab_size": 64,
        "max_position_embeddings": 16,
        "rope_scaling": {"type": "dynamic", "factor": 2.0},
    },
    "phi3small": {
        "model_type": "phi3small",
        "hidden_size": 32,
        "dense_attention_every_n_layers": 2,
        "ff_intermediate_size": 32,
        "gegelu_limit": 20.0,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "layer_norm_epsilon": 1e-5,
        "vocab_size": 100352,
        "num_key_value_heads": 2,
        "blocksparse_block_size": 32,
        "blocksparse_num_local_blocks": 1,
        "blocksparse_vert_stride": 3,
    },
    "dbrx": {
        "model_type": "dbrx",
        "vocab_size": 64,
        "d_model": 32,
        "ffn_config": {"ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2, "moe_jitter_eps": 0},
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8, "rope_theta": 10000.0},
        "n_layers": 2,
        "n_heads": 4,
    },
    "minimax_m3_vl": {
        "model_type": "minimax_m3_vl",
        "text_config": {
            "model_type": "minimax_m3_vl",
            "hidden_size": 32,
            "intermediate_size": 32,
            "dense_intermediate_size": 32,
            "shared_intermediate_size": 32,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "num_hidden_layers": 2,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "max_position_embeddings": 1000,
            "rope_theta": 10000.0,
            "head_dim": 16,
            "rotary_dim": 8,
            "vocab_size": 64,
            "routed_scaling_factor": 1.0,
            "moe_layer_freq": [0, 1],
            "sparse_attention_config": {
                "sparse_num_index_heads": 2,
                "sparse_index_dim": 16,
                "sparse_block_size": 4,
                "sparse_topk_blocks": 3,
                "sparse_local_block": 1,
                "sparse_attention_freq": [1, 1],
            },
        },
    },
}
"""Of each family, small; windows, chunks and blocks are few tokens, so that short texts go past them."""

_FOLDER = tempfile.TemporaryDirectory(prefix="mlx-audit-patched-")


def source_of(family: str) -> str:
    """Return mlx-lm's own source of a family."""
    return Path(str(module_of(family).__file__)).read_text()


def mended(source: str, *names: str) -> str:
    """Return a source after these codemods alone."""
    own = {mod.name: mod for mod in codemods()}
    tree = cst.parse_module(source)
    for name in names:
        tree = own[name].apply(tree)
    return tree.code


def untouched(source: str, name: str) -> bool:
    """Return whether a codemod leaves a source alone, and says so by returning the tree itself."""
    (mod,) = (mod for mod in codemods() if mod.name == name)
    tree = cst.parse_module(source)
    return mod.apply(tree) is tree


@functools.cache
def model_of(family: str, *names: str) -> nn.Module:
    """Return a family's tiny model, with these codemods applied; the weights are the same, and tests leave it be."""
    module = module_of(family)
    if names:
        file = Path(_FOLDER.name) / f"{family}_{'_'.join(names)}.py"
        file.write_text(mended(source_of(family), *names))
        module = import_file(file)
    return build_tiny(module, resolve_arguments(module, CONFIGURATIONS[family]), seed=0)


def model_from(family: str, source: str, folder: Path) -> nn.Module:
    """Return a family's tiny model as another source has it, with the same weights."""
    file = folder / f"{family}_{zlib.crc32(source.encode()):08x}.py"
    file.write_text(source)
    module = import_file(file)
    return build_tiny(module, resolve_arguments(module, CONFIGURATIONS[family]), seed=0)


def text(count: int, seed: int = 3) -> list[int]:
    """Return random ids that every family here knows."""
    return [int(token) for token in np.random.default_rng(seed).integers(0, 64, count)]


def eager(
    model: nn.Module, prompt: Sequence[int], following: Sequence[int], chunk: int = 0
) -> list[mx.array]:
    """Return the logits after a prompt, read in one piece or in chunks, and after each token that follows."""
    cache = make_prompt_cache(model)
    size = chunk or len(prompt)
    pieces = [list(prompt[at : at + size]) for at in range(0, len(prompt), size)]
    logits = [
        model(mx.array([piece]), cache=cache)[:, -1] for piece in [*pieces, *([token] for token in following)]
    ]
    mx.eval(logits)
    return logits[len(pieces) - 1 :]


def compiled(
    model: nn.Module, prompt: Sequence[int], following: Sequence[int], capacity: int = 128
) -> list[mx.array]:
    """Return the logits after a prompt, and after each token that follows, of a compiled session."""
    session = CompiledDecodeSession(model, capacity, evidence="ignore")
    return [session.prefill([list(prompt)]), *(session.step([token]) for token in following)]


def side_by_side(
    model: nn.Module, prompts: Sequence[Sequence[int]], following: Sequence[int], capacity: int = 128
) -> list[mx.array]:
    """Return the logits of rows of different length, `[B, vocabulary]` a call."""
    lengths = [len(prompt) for prompt in prompts]
    padded = [[*prompt, *[0] * (max(lengths) - len(prompt))] for prompt in prompts]
    session = CompiledDecodeSession(model, capacity, batch_size=len(prompts), evidence="ignore")
    return [
        session.prefill(padded, lengths=lengths),
        *(session.step([token] * len(prompts)) for token in following),
    ]


def apart(got: Sequence[mx.array], want: Sequence[mx.array]) -> float:
    """Return the largest difference, relative to the largest logit; ids that are never chosen aside."""
    pairs = [(np.array(a), np.array(b)) for a, b in zip(got, want, strict=True)]
    known = [(a[np.isfinite(b)], b[np.isfinite(b)]) for a, b in pairs]
    return max(float(np.abs(a - b).max() / np.abs(b).max()) for a, b in known)


def equal(got: Sequence[mx.array], want: Sequence[mx.array]) -> bool:
    """Return whether logits are the same bit for bit."""
    return all(bool(mx.array_equal(a, b)) for a, b in zip(got, want, strict=True))


def write_configuration(folder: Path, family: str) -> Path:
    """Write a family's tiny configuration as a `config.json`."""
    file = folder / "config.json"
    file.write_text(json.dumps(CONFIGURATIONS[family]))
    return file
