"""Tiny configurations: a real one, shrunk, for families that have no manifest."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

_SIZES: tuple[tuple[str, int], ...] = (
    (r"(padded_|org_)?vocab_size\w*|num_vocab|embedding_size", 64),
    (r"(max|n)_(position|seq|ctx)\w*|model_max_length|n_ctx|block_size|seq_length", 4096),
    (r"original_max_position_embeddings|floor_scale", 16),
    (r"(\w+_)?(sliding_window|window_size|window|attention_chunk_size|sliding_window_size)", 8),
    (r"hidden_size_per_layer_input|hidden_size_per_head|query_pre_attn_scalar", 8),
    (r"\w*(moe|expert|shared)\w*(intermediate|hidden|ffn|latent)\w*|share_expert_dim|moe_hidden_size", 16),
    (r"\w*(intermediate|ffn_hidden|mlp_hidden|ff_dim)\w*|n_inner", 64),
    (r"hidden_size|hidden_dim|d_model|n_embd|model_dim|block_dim|lru_width|dim_model_base|mamba_d_ssm", 32),
    (
        r"mamba_d_state|ssm_state_size|state_size|mamba_d_head|mamba_chunk_size|chunk_size|block_multiple_of",
        8,
    ),
    (r"qk_nope_head_dim", 12),
    (r"index_head_dim", 16),
    (r"\w*(head_dim|d_head|kv_channels|rotary_dim)", 8),
    (r"\w*(low_rank_dim|lora_rank)", 16),
    (r"laurel_rank", 8),
    (r"\w*(num_key_value_heads|num_kv_heads|n_kv_heads|num_key_heads|attention_groups|query_group_num)", 2),
    (r"\w*(num_attention_heads|num_heads|num_value_heads|n_heads?|num_query_heads)(_per_layer)?", 4),
    (r"index_topk", 20),
    (r"n_routed_experts|(moe_)?num_experts|num_local_experts", 4),
    (r"num_experts_per_tok(en)?|experts_per_token|moe_(top_?)?k|n_groups?|mamba_n_groups|o_groups", 2),
    (r"topk_group|n_shared_experts|(moe_)?num_shared_experts?|altup_active_idx", 1),
    (r"altup_num_inputs|num_expert_groups?|zero_expert_num|hc_mult|num_hash_layers", 2),
)
"""What mlx-lm's families call their sizes, and what becomes of them at most; the first pattern that fits counts."""

_HEAD = 8
_WIDER = (r"\w*(head_dim|d_head|kv_channels|rotary_dim)", r"hidden_size|hidden_dim|d_model|n_embd|model_dim")
"""What is twice as large where heads are."""

_LAYERS = re.compile(r"(num_)?(hidden_|transformer_)?layers|n_layers?|num_layers")
_PERIOD = re.compile(r"\w*(interval|pattern|period|every_n_layers|layer_group_size|layer_step)")
_SOME_LAYERS = re.compile(
    r"first_k_dense\w*|num_dense_layers|moe_layer_start_index|\w*_layer_offset|num_kv_(shared|reuse)_layers"
)

_LARGEST = 64
_MOST_LAYERS = 12
"""A configuration whose hidden size and layers are at most these is tiny already."""

_SPARE = 3
"""Entries that a list of one a layer may have beyond the layers, for heads that predict further tokens."""


@dataclass(frozen=True)
class Plan:
    """How a configuration is shrunk.

    Attributes:
        layers: The layers that are kept, by number; lists with one entry a layer keep these.
        period: What periods of layers become at most; 0 leaves them.
        some: What numbers of layers that differ from the rest become at most; 0 leaves them.
        wide: Whether heads are twice as wide, for rotary embeddings over part of them.
        rotary: The part of each head that is rotated.
    """

    layers: Sequence[int] = (0, 1, 2, 3)
    period: int = 0
    some: int = 0
    wide: bool = False
    rotary: float = 1.0

    @property
    def rotated(self) -> int:
        """How many of a head's dimensions are rotated."""
        return int(_HEAD * (2 if self.wide else 1) * self.rotary)


def shrink(config: Mapping[str, Any], plan: Plan = Plan(), count: int | None = None) -> dict[str, Any]:
    """Return a configuration with the common sizes made tiny and everything else kept.

    Only keys that are there are changed, and only made smaller. Nested configurations are shrunk alike.

    Args:
        config: A configuration of any size.
        plan: How it is shrunk.
        count: How many layers it has, where it may not say so itself.
    """
    count = layer_count(config) or count
    if _width(config) <= _LARGEST and (count or 0) <= _MOST_LAYERS:
        return dict(config)
    partial = config.get("partial_rotary_factor")
    if isinstance(partial, int | float):
        plan = replace(plan, rotary=float(partial))
    tiny = {key: _shrunk(key, value, plan, count) for key, value in config.items()}
    for heads, groups in (("num_attention_heads", "num_key_value_heads"), ("n_heads", "n_kv_heads")):
        if config.get(heads) == config.get(groups) and isinstance(tiny.get(groups), int):
            tiny[groups] = tiny[heads]
    for key in ("quantization", "quantization_config", "vision_config", "audio_config"):
        tiny.pop(key, None)
    return tiny


def layer_count(config: Mapping[str, Any]) -> int | None:
    """Return how many layers a configuration, or the one inside it, says that there are."""
    for key, value in config.items():
        if type(value) is int and _LAYERS.fullmatch(key):
            return value
    nested = [value for value in config.values() if isinstance(value, Mapping)]
    return next((found for value in nested if (found := layer_count(value)) is not None), None)


def _width(config: Mapping[str, Any]) -> int:
    nested = config.get("text_config")
    found = config.get("hidden_size", nested.get("hidden_size") if isinstance(nested, Mapping) else None)
    return found if isinstance(found, int) else _LARGEST + 1


def _shrunk(key: str, value: Any, plan: Plan, count: int | None) -> Any:
    if isinstance(value, Mapping):
        own = layer_count(value) or count
        partial = value.get("partial_rotary_factor")
        if isinstance(partial, int | float):
            plan = replace(plan, rotary=float(partial))
        return {name: _shrunk(name, item, plan, own) for name, item in value.items()}
    if type(value) is int:
        return _number(key, value, plan, count)
    if isinstance(value, list) and key in ("short_factor", "long_factor"):
        return value[: plan.rotated // 2]
    if key == "mrope_section" and isinstance(value, list):
        return [4, 2, 2] if plan.wide else [2, 1, 1]
    if isinstance(value, list | str) and count is not None and count > 1:
        return _per_layer(key, value, plan, count)
    return value


def _number(key: str, value: int, plan: Plan, count: int | None) -> int:
    if _LAYERS.fullmatch(key) or (value == count and key.endswith("layers")):
        return len(plan.layers)
    if plan.period and _PERIOD.fullmatch(key):
        return min(value, plan.period)
    if plan.some and _SOME_LAYERS.fullmatch(key):
        return min(value, plan.some)
    for pattern, size in _SIZES:
        if re.fullmatch(pattern, key):
            wider = plan.wide and any(re.fullmatch(wide, key) for wide in _WIDER)
            return min(value, size * 2 if wider else size)
    return value


def _per_layer(key: str, value: Any, plan: Plan, count: int) -> Any:
    """Keep the entries of the kept layers; in a list of layers, those of them that are kept, with their new numbers."""
    if count <= len(value) <= count + _SPARE:
        kept = [value[at] for at in plan.layers]
        if isinstance(value, str):
            return "".join(kept)
        return [_shrunk(key, item, plan, None) for item in kept]
    numbers = isinstance(value, list) and all(type(item) is int for item in value)
    if numbers and value == sorted(set(value)) and re.search(r"layers?$|idxs?$|ind[ei]", key):
        one = count in value and 0 not in value
        return [at + one for at, layer in enumerate(plan.layers) if layer + one in value]
    return value
