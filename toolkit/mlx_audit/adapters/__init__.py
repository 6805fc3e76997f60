"""Adapters: how a model comes by its fixed-capacity caches."""

from __future__ import annotations

from mlx_audit.adapters.declared import allocate, entry
from mlx_audit.adapters.discovery import adapter_for
from mlx_audit.adapters.generic import GenericAdapter
from mlx_audit.adapters.module_state import ModuleState, Parameters, Slot, parameter_slots, snapshots_reused
from mlx_audit.adapters.protocol import FixedCapacityKVCacheProviding

__all__ = [
    "FixedCapacityKVCacheProviding",
    "GenericAdapter",
    "ModuleState",
    "Parameters",
    "Slot",
    "adapter_for",
    "allocate",
    "entry",
    "parameter_slots",
    "snapshots_reused",
]
