"""Subjects for every kind of cache: mlx-lm families, and model files for the kinds that no small family has.

Exactness is `reordered`: rings are read in another order than eager decoding reads them.
"""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from typing import Any

from audited import mutated, new_subject
from mlx_audit.checks.subject import Subject
from tiny_models import config_of, module_of

WINDOW = 8
_IMPORT = "from .cache import KVCache, RotatingKVCache\n"
_MASK = "        fa_mask = create_attention_mask(h, cache[self.fa_idx])\n"
_MAKE = "    def make_cache(self):\n"
_CHUNK_MASK = f"""
CHUNK = {WINDOW}


def _chunk_mask(h, cache):
    # Serves a native cache, which makes no mask of its own, and one that does.
    N = h.shape[1]
    if hasattr(cache, "make_mask"):
        return cache.make_mask(N)
    start, offset = (0, 0) if cache is None else (cache.start_position, cache.offset)
    times, queries = mx.arange(start, offset + N), mx.arange(offset, offset + N)[:, None]
    return (queries >= times) & (queries // CHUNK == times // CHUNK)


"""
_LOOP = """        for part in cache:
            if part is not None:
                part.maybe_trim_front()
        fa_mask = _chunk_mask(h, cache[0])
"""
_CHUNKED = (
    (_IMPORT, "from .cache import ChunkedKVCache, KVCache, RotatingKVCache\n"),
    ("@dataclass\n", f"{_CHUNK_MASK}@dataclass\n"),
    (
        _MASK,
        _LOOP,
    ),
    (_MAKE, f"{_MAKE}        return [ChunkedKVCache(CHUNK) for _ in self.layers]\n\n"),
)
_QUANTIZED = (
    (_IMPORT, "from .cache import KVCache, QuantizedKVCache, RotatingKVCache\n"),
    (_MAKE, f"{_MAKE}        return [QuantizedKVCache(32, 8) for _ in self.layers]\n\n"),
)
_KEEPING = ((_MAKE, f"{_MAKE}        return [RotatingKVCache({WINDOW}, keep=2) for _ in self.layers]\n\n"),)
FILES = {"chunked": _CHUNKED, "quantized": _QUANTIZED, "keeping": _KEEPING}
"""Copies of mlx-lm's llama whose layers use another kind of cache."""

_ZOO: dict[str, dict[str, Any]] = {
    "rotating": {
        "model_type": "llama",
        "head_dim": 8,
        "sliding_window": WINDOW,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "arrays": {
        "model_type": "mamba2",
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
    "composite": {
        "model_type": "falcon_h1",
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
    "composite_of_slots": {
        "model_type": "deepseek_v32",
        "index_head_dim": 16,
        "index_n_heads": 2,
        "index_topk": 8,
        "moe_intermediate_size": 32,
        "n_shared_experts": 1,
        "n_routed_experts": 4,
        "routed_scaling_factor": 1.0,
        "kv_lora_rank": 16,
        "q_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
        "qk_nope_head_dim": 16,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "norm_topk_prob": True,
        "n_group": 2,
        "topk_group": 1,
        "num_experts_per_tok": 2,
        "moe_layer_freq": 1,
        "first_k_dense_replace": 1,
    },
}
KINDS = (*_ZOO, *FILES)


@functools.cache
def kind_subject(kind: str) -> Subject:
    """Return the healthy subject of a kind, shared by all tests that plant nothing in its model."""
    return new_kind_subject(kind)


def new_kind_subject(kind: str) -> Subject:
    """Return a subject whose caches are of a kind, or mixed with linear ones; nothing is declared for it."""
    if kind in FILES:
        folder = Path(tempfile.mkdtemp(prefix="mlx-audit-tests-"))
        config = config_of("llama", head_dim=32)
        return new_subject(
            module=mutated(folder, *FILES[kind]), config=config, exactness="reordered", expected=None
        )
    config = {**config_of("llama"), **_ZOO[kind]}
    family = str(config["model_type"])
    return new_subject(family, module_of(family), config=config, exactness="reordered", expected=None)
