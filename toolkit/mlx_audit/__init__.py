"""mlx-audit: declare and prove which LLM families may run compiled decoding on MLX."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mlx_audit._version import __version__

if TYPE_CHECKING:
    from mlx_audit.adapters import FixedCapacityKVCacheProviding, adapter_for
    from mlx_audit.caches import FixedCapacityCache, FixedCapacityKVCache
    from mlx_audit.decode import CompiledDecodeSession
    from mlx_audit.models.checkpoint import load
    from mlx_audit.prefix import CachedSession, PrefixCache

__all__ = [
    "CachedSession",
    "CompiledDecodeSession",
    "FixedCapacityCache",
    "FixedCapacityKVCache",
    "FixedCapacityKVCacheProviding",
    "PrefixCache",
    "__version__",
    "adapter_for",
    "load",
]

_HOMES = {
    "CachedSession": "prefix",
    "CompiledDecodeSession": "decode",
    "FixedCapacityCache": "caches",
    "FixedCapacityKVCache": "caches",
    "FixedCapacityKVCacheProviding": "adapters",
    "PrefixCache": "prefix",
    "adapter_for": "adapters",
    "load": "models.checkpoint",
}


def __getattr__(name: str) -> Any:
    """Import the public names on first use: the command line must start without MLX."""
    if name in _HOMES:
        from importlib import import_module

        return getattr(import_module(f"mlx_audit.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
