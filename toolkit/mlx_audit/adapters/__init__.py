"""Adapters: how a model comes by its fixed-capacity caches."""

from __future__ import annotations

from typing import Literal

import mlx.nn as nn

from mlx_audit.adapters.generic import GenericAdapter, live_kinds
from mlx_audit.adapters.module_state import ModuleState, Parameters, Slot, parameter_slots, snapshots_reused
from mlx_audit.adapters.protocol import FixedCapacityKVCacheProviding
from mlx_audit.evidence import identify

__all__ = [
    "FixedCapacityKVCacheProviding",
    "GenericAdapter",
    "ModuleState",
    "Parameters",
    "Slot",
    "adapter_for",
    "live_kinds",
    "parameter_slots",
    "snapshots_reused",
]


def adapter_for(
    model: nn.Module, *, evidence: Literal["required", "ignore"] = "required"
) -> FixedCapacityKVCacheProviding:
    """Return what makes fixed-capacity caches for a model.

    A model that provides them itself is taken at its word; otherwise the topology decides.

    Args:
        model: An mlx-lm model.
        evidence: `required` takes the topology from the manifest that declares the model, and refuses a model that
            none declares; `ignore` reads it off the model's own `make_cache()`.

    Raises:
        NotCompileCapable: no manifest covers the model, or a cache class has no fixed-capacity form.
    """
    if isinstance(model, FixedCapacityKVCacheProviding):
        return model
    if evidence == "ignore":
        return GenericAdapter(model)
    manifest, _, arguments = identify(model)
    return GenericAdapter(model, [spec.kind for spec in manifest.cache_specs(arguments)])
