"""The topology that a built model really has, in the words of a manifest."""

from __future__ import annotations

from typing import Any

import mlx.nn as nn
from mlx_lm.models import cache as native

from mlx_audit.manifests import CacheSpec


def live_specs(model: nn.Module) -> list[CacheSpec | str]:
    """Return what each entry of the model's own `make_cache()` is; a class that is not known is given by name."""
    return [spec_of(entry) for entry in native.make_prompt_cache(model)]


def spec_of(entry: Any) -> CacheSpec | str:
    """Return an mlx-lm cache as kind and parameters, or the name of a class that is not known."""
    if type(entry) is native.KVCache:
        return CacheSpec("linear")
    if type(entry) is native.RotatingKVCache:
        return CacheSpec("rotating", (("window", entry.max_size), ("keep", entry.keep)))
    if type(entry) is native.ArraysCache:
        return CacheSpec("arrays", (("slots", len(entry.cache)),))
    if type(entry) is native.ChunkedKVCache:
        return CacheSpec("chunked", (("chunk", entry.chunk_size),))
    if type(entry) is native.QuantizedKVCache:
        return CacheSpec("quantized", (("bits", entry.bits), ("group_size", entry.group_size)))
    if type(entry) is native.CacheList:
        parts = [spec_of(part) for part in entry.caches]
        if all(isinstance(part, CacheSpec) for part in parts):
            return CacheSpec("composite", (), tuple(part for part in parts if isinstance(part, CacheSpec)))
    return f"{type(entry).__module__}.{type(entry).__qualname__}"
