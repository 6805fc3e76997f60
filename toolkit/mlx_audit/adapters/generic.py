"""The adapter that serves every family whose topology consists of known cache kinds."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.nn as nn

from mlx_audit.adapters.declared import allocate, require_known
from mlx_audit.caches import FixedCapacityCache
from mlx_audit.manifests import CacheSpec
from mlx_audit.models.live import live_specs


class GenericAdapter:
    """Makes fixed-capacity caches for a model from its topology.

    Args:
        model: An mlx-lm model; its parameters may be lazy, nothing is evaluated.
        specs: What each entry of `make_cache()` must be; by default what the live caches are.

    Raises:
        NotCompileCapable: a live cache class has no fixed-capacity form.
    """

    def __init__(self, model: nn.Module, specs: Sequence[CacheSpec] | None = None) -> None:
        self.model = model
        self.specs = live_specs(model) if specs is None else list(specs)
        require_known(model, self.specs)

    def new_fixed_capacity_cache(self, max_tokens: int, *, batch_size: int = 1) -> list[FixedCapacityCache]:
        """Return one empty cache an entry of `make_cache()`; see `FixedCapacityKVCacheProviding`."""
        return allocate(self.model, self.specs, max_tokens, batch_size)
