"""What a published configuration says of each layer's cache by itself: transformers' `layer_types`.

transformers makes a static cache from this key, one layer class a type. The table is read from its
`cache_utils.STATIC_LAYER_TYPE_MAPPING`, and the older names from `configuration_utils._LEGACY_LAYER_TYPE_REMAP`, both
of transformers 5.24.0. transformers itself is not needed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from mlx_audit.manifests import CacheSpec
from mlx_audit.models.live import leaves

_ALL_TOKENS = ("linear", "quantized")
_OF_TOKENS = (*_ALL_TOKENS, "rotating", "chunked")


@dataclass(frozen=True)
class LayerNeed:
    """What a layer type keeps: keys and values of which tokens, and whether a recurrent state."""

    tokens: Literal["all", "window", "chunk"] | None
    state: bool = False

    @property
    def cached(self) -> bool:
        """Whether such a layer has a cache at all."""
        return self.tokens is not None or self.state


_ALL, _STATE, _NOTHING = LayerNeed("all"), LayerNeed(None, state=True), LayerNeed(None)

LAYER_TYPES = {
    "full_attention": _ALL,
    "attention": _ALL,
    "indexed_attention": _ALL,
    "deepseek_sparse_attention": _ALL,
    "qwen_sparse_attention": _ALL,
    "sparse_attention": _ALL,  # not transformers': mlx_lm/models/minimax_m3_vl.py, which chooses among all tokens
    "sliding_attention": LayerNeed("window"),
    "chunked_attention": LayerNeed("chunk"),
    "linear_attention": _STATE,
    "mamba": _STATE,
    "conv": _STATE,
    "hybrid": LayerNeed("all", state=True),
    "hybrid_sliding": LayerNeed("window", state=True),
    "moe": _NOTHING,
    "mlp": _NOTHING,
}
"""Each known type; of any other one nothing can be said."""

_SIZE_KEYS = {"window": "sliding_window", "chunk": "attention_chunk_size"}


class Undecidable(Exception):
    """The configuration does not say enough; the message says what is missing."""


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the part of a configuration that `layer_types` is in: `text_config` where it has them, else itself."""
    inner = config.get("text_config")
    return inner if isinstance(inner, Mapping) and inner.get("layer_types") is not None else config


def cached_layers(config: Mapping[str, Any]) -> list[int]:
    """Return the layers that keep a cache of their own, by index in `layer_types`.

    Raises:
        Undecidable: a type is not known, so that nobody can say whether such a layer has a cache.
    """
    types = config["layer_types"]
    if not isinstance(types, list):
        raise Undecidable(f"layer_types is no list but {type(types).__name__}")
    shared = config.get("num_kv_shared_layers") or 0
    if not isinstance(shared, int) or not 0 <= shared <= len(types):
        raise Undecidable(f"num_kv_shared_layers is {shared!r}, of {len(types)} layers")
    for index, name in enumerate(types):
        if not isinstance(name, str) or name not in LAYER_TYPES:
            raise Undecidable(f"layer {index}: {name!r} is not a layer type that is known here")
    # The last layers read what earlier ones wrote.
    return [index for index in range(len(types) - shared) if LAYER_TYPES[types[index]].cached]


def disagreement(layer_type: str, spec: CacheSpec, config: Mapping[str, Any]) -> str | None:
    """Return what a live cache keeps that a layer of this type does not allow, or None where they agree.

    Raises:
        Undecidable: the configuration does not say how wide the window is.
    """
    need, parts = LAYER_TYPES[layer_type], leaves(spec)
    of_tokens = [part for part in parts if part.kind in _OF_TOKENS]
    if need.state and not any(part.kind == "arrays" for part in parts):
        return "it keeps a state, in arrays"
    if need.tokens is None:
        return "it keeps no keys and values of tokens" if of_tokens else None
    if not of_tokens:
        return "it keeps keys and values of tokens"
    return next((why for part in of_tokens if (why := _forgets(need.tokens, part, config))), None)


def keeps_more(layer_type: str, spec: CacheSpec) -> bool:
    """Return whether a cache of all tokens serves a layer that attends to a window or a chunk; allowed."""
    limited = LAYER_TYPES[layer_type].tokens in _SIZE_KEYS
    return limited and any(part.kind in _ALL_TOKENS for part in leaves(spec))


def _forgets(tokens: str, part: CacheSpec, config: Mapping[str, Any]) -> str | None:
    if part.kind in _ALL_TOKENS:
        return None
    if tokens == "all":
        return "it keeps every token"
    wanted = _wanted(tokens, config)
    return None if part == wanted else f"it keeps {wanted.label()}, or every token"


def _wanted(tokens: str, config: Mapping[str, Any]) -> CacheSpec:
    size = config.get(_SIZE_KEYS[tokens])
    if not isinstance(size, int) or isinstance(size, bool):
        raise Undecidable(f"the configuration gives no number as {_SIZE_KEYS[tokens]}, but {size!r}")
    if tokens == "chunk":
        return CacheSpec("chunked", (("chunk", size),))
    return CacheSpec("rotating", (("window", size), ("keep", 0)))


def agreed(types: Sequence[str], specs: Sequence[CacheSpec]) -> dict[str, int]:
    """Return how many layers there are of each type on each cache: `{"full_attention on linear": 12}`."""
    names = [f"{name} on {spec.label()}" for name, spec in zip(types, specs, strict=True)]
    return {name: names.count(name) for name in dict.fromkeys(names)}
