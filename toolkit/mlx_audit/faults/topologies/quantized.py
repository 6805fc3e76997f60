"""mlx-lm's llama over caches that quantize what they are given, as `--kv-bits` makes them."""

from __future__ import annotations

from typing import Any

from mlx_lm.models.cache import QuantizedKVCache
from mlx_lm.models.llama import Model as Llama
from mlx_lm.models.llama import ModelArgs

__all__ = ["Model", "ModelArgs"]


class Model(Llama):  # type: ignore[misc]
    """Quantizes from the first token on."""

    def make_cache(self) -> list[Any]:
        return [QuantizedKVCache(group_size=32, bits=8) for _ in self.layers]
