"""Tiny configurations: a real one, shrunk, for families that have no manifest."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_SIZES = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 64,
}
"""What most mlx-lm families call their sizes."""

_WINDOW = 8
"""Tokens that a sliding window keeps: a short run turns its ring several times."""

_LARGEST = 64
"""A configuration whose hidden size is at most this is tiny already."""


def shrink(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration with the common sizes made tiny and everything else kept.

    Only keys that are there are changed; lists with one entry a layer are cut to the new number of layers. The text
    part of a nested configuration is shrunk alike.
    """
    nested = config.get("text_config")
    if isinstance(nested, Mapping):
        return {**config, "text_config": shrink(nested)}
    layers = config.get("num_hidden_layers")
    if isinstance(config.get("hidden_size"), int) and config["hidden_size"] <= _LARGEST:
        return dict(config)
    tiny = {
        key: min(value, _SIZES[key]) if key in _SIZES and isinstance(value, int) else value
        for key, value in config.items()
    }
    if isinstance(layers, int):
        for key, value in tiny.items():
            if isinstance(value, list) and len(value) == layers:
                tiny[key] = value[: tiny["num_hidden_layers"]]
    if (
        config.get("num_attention_heads") == config.get("num_key_value_heads")
        and "num_key_value_heads" in tiny
    ):
        tiny["num_key_value_heads"] = tiny["num_attention_heads"]
    if isinstance(config.get("sliding_window"), int):
        tiny["sliding_window"] = min(config["sliding_window"], _WINDOW)
    tiny.pop("quantization", None)
    tiny.pop("quantization_config", None)
    return tiny
