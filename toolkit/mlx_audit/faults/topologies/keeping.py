"""mlx-lm's llama over rings that keep the first two tokens of the text."""

from __future__ import annotations

from typing import Any

from mlx_lm.models.cache import RotatingKVCache
from mlx_lm.models.llama import Model as Llama
from mlx_lm.models.llama import ModelArgs

__all__ = ["Model", "ModelArgs"]


class Model(Llama):  # type: ignore[misc]
    """As mlx-lm's `--max-kv-size` makes it."""

    def make_cache(self) -> list[Any]:
        return [RotatingKVCache(max_size=8, keep=2) for _ in self.layers]
