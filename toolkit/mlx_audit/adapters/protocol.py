"""The protocol that a model, or an adapter beside it, implements to take part in compiled decoding."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from mlx_audit.caches import FixedCapacityCache


@runtime_checkable
class FixedCapacityKVCacheProviding(Protocol):
    """A promise about behaviour, not only a method: the family was audited with these caches.

    The name follows mlx-swift-lm's protocol (ml-explore/mlx-swift-lm#550).
    """

    def new_fixed_capacity_cache(self, max_tokens: int, *, batch_size: int = 1) -> list[FixedCapacityCache]:
        """Return one empty cache for each entry of the model's own `make_cache()`, in its order.

        Args:
            max_tokens: Capacity in tokens, prompt included.
            batch_size: Rows decoded side by side.
        """
        ...
