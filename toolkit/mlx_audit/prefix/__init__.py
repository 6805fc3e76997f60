"""Prefix reuse: an index of token prefixes, whole-stack snapshots, and the rules by which they are restored."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mlx_audit.prefix.arguments import Taken
    from mlx_audit.prefix.cache import PrefixCache
    from mlx_audit.prefix.fingerprint import Fingerprint
    from mlx_audit.prefix.log import CacheStats
    from mlx_audit.prefix.mlx_lm_server import PrefixPromptCache
    from mlx_audit.prefix.plan import Plan, Policy
    from mlx_audit.prefix.pool import EntryKind
    from mlx_audit.prefix.prefill import Prefilled
    from mlx_audit.prefix.reasons import PrefixRefused, Reason
    from mlx_audit.prefix.session import CachedSession

__all__ = [
    "CacheStats",
    "CachedSession",
    "EntryKind",
    "Fingerprint",
    "Plan",
    "Policy",
    "Prefilled",
    "PrefixCache",
    "PrefixPromptCache",
    "PrefixRefused",
    "Reason",
    "Taken",
]

_HOMES = {
    "CacheStats": "log",
    "CachedSession": "session",
    "EntryKind": "pool",
    "Fingerprint": "fingerprint",
    "Plan": "plan",
    "Policy": "plan",
    "PrefixCache": "cache",
    "PrefixPromptCache": "mlx_lm_server",
    "PrefixRefused": "reasons",
    "Prefilled": "prefill",
    "Reason": "reasons",
    "Taken": "arguments",
}


def __getattr__(name: str) -> Any:
    """Import the public names on first use: the index and the rules must be readable without MLX."""
    if name in _HOMES:
        from importlib import import_module

        return getattr(import_module(f"mlx_audit.prefix.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
