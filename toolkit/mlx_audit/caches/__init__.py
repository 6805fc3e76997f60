"""Fixed-capacity caches, one file a kind; a new kind is found by its class, not by a list."""

from __future__ import annotations

import importlib
import pkgutil

from mlx_audit.caches.base import FixedCapacityCache, Handed, Role, handle, host_float, host_int
from mlx_audit.caches.composite import FixedCapacityCacheList
from mlx_audit.caches.linear import FixedCapacityKVCache

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")

__all__ = [
    "FixedCapacityCache",
    "FixedCapacityCacheList",
    "FixedCapacityKVCache",
    "Handed",
    "Role",
    "cache_class",
    "handle",
    "host_float",
    "host_int",
    "kind_of",
]


def cache_class(kind: str) -> type[FixedCapacityCache] | None:
    """Return the cache class of a manifest kind such as `linear`, or None where there is none yet."""
    return next((cls for cls in _classes() if cls.kind == kind), None)


def kind_of(native: object) -> str | None:
    """Return the manifest kind that stands in for an mlx-lm cache, by its exact class; None for an unknown class."""
    return next((cls.kind for cls in _classes() if cls.native is type(native)), None)


def _classes() -> list[type[FixedCapacityCache]]:
    """Return the classes of this package; a user's subclass of one of them takes nobody's place."""
    found: list[type[FixedCapacityCache]] = []
    waiting = FixedCapacityCache.__subclasses__()
    while waiting:
        cls = waiting.pop(0)
        own = cls.__module__.startswith(f"{__name__}.") and "kind" in vars(cls)
        found += [cls] if own else []
        waiting += cls.__subclasses__()
    return found
