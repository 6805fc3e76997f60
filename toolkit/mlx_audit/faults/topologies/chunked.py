"""mlx-lm's llama whose tokens see their own chunk only, in caches that drop the chunks before it."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import ChunkedKVCache
from mlx_lm.models.llama import LlamaModel, ModelArgs
from mlx_lm.models.llama import Model as Llama

__all__ = ["Model", "ModelArgs"]

CHUNK = 8


class ChunkedModel(LlamaModel):  # type: ignore[misc]
    """The layers, under a mask by chunks."""

    def __call__(self, inputs: mx.array, cache: Any = None, input_embeddings: Any = None) -> mx.array:
        h = self.embed_tokens(inputs)
        cache = [None] * len(self.layers) if cache is None else cache
        for part in cache:
            if part is not None:
                part.maybe_trim_front()
        mask = _mask(h.shape[1], cache[0])
        for layer, part in zip(self.layers, cache, strict=True):
            h = layer(h, mask, cache=part)
        return self.norm(h)  # type: ignore[no-any-return]


class Model(Llama):  # type: ignore[misc]
    """Every layer is chunked."""

    def __init__(self, args: ModelArgs) -> None:
        super().__init__(args)
        self.model = ChunkedModel(args)

    def make_cache(self) -> list[Any]:
        return [ChunkedKVCache(CHUNK) for _ in self.layers]


def _mask(N: int, cache: Any) -> mx.array:
    """Return the mask of the next `N` tokens; mlx-lm's own chunked cache makes none."""
    if hasattr(cache, "make_mask"):
        return cache.make_mask(N)  # type: ignore[no-any-return]
    start, offset = (0, 0) if cache is None else (cache.start_position, cache.offset)
    times, queries = mx.arange(start, offset + N), mx.arange(offset, offset + N)[:, None]
    return (queries >= times) & (queries // CHUNK == times // CHUNK)
