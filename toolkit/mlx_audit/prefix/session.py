"""A compiled decode session whose prompts are read through a prefix cache."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_audit.decode import CompiledDecodeSession
from mlx_audit.errors import SessionMisuse
from mlx_audit.prefix.arguments import Namespace
from mlx_audit.prefix.cache import PrefixCache
from mlx_audit.prefix.log import logger


class CachedSession(CompiledDecodeSession):
    """A `CompiledDecodeSession` that restores what of its prompt is stored, feeds the rest, and decodes as ever.

    The prompt is read on the chunk grid of the prefix cache, so a session that found its prompt stored is equal, bit by
    bit, to one that found nothing. Rows of different length are each looked up; those of equal length are read
    together, as a snapshot holds one row, without the cache.

    Args:
        model: The model of the prefix cache.
        max_tokens: Capacity in tokens, prompt included.
        batch_size: Rows decoded side by side.
        prefix_cache: Where prompts are looked up and left.
        namespace: Fields of the fingerprint for this session.
        stops: Positions where prompts will part, such as the end of a system prompt.
        options: Those of `CompiledDecodeSession`.

    Raises:
        SessionMisuse: the prefix cache is another model's.
    """

    def __init__(
        self,
        model: nn.Module,
        max_tokens: int = 512,
        batch_size: int = 1,
        *,
        prefix_cache: PrefixCache,
        namespace: Namespace | None = None,
        stops: tuple[int, ...] = (),
        **options: Any,
    ) -> None:
        if prefix_cache.model is not model:
            raise SessionMisuse(
                "the prefix cache is another model's",
                where="prefix_cache",
                found=type(prefix_cache.model).__module__,
                allowed="a cache of the session's own model object",
            )
        super().__init__(model, max_tokens, batch_size, **options)
        self._prefixes, self._namespace, self._stops = prefix_cache, namespace, stops

    def _read_eagerly(self, ids: mx.array) -> tuple[mx.array, list[Any]]:
        if ids.shape[0] != 1:
            logger.info("outcome=bypassed reason=batched rows=%d input_tokens=%d", *ids.shape)
            with self._prefixes.lock:
                return super()._read_eagerly(ids)
        row: Any = ids[0].tolist()
        logits, caches, _ = self._prefixes.prefill(row, stops=self._stops, namespace=self._namespace)
        return logits, caches
