"""Which rules of a manifest's topology does a model reach that the audited tiny model does not?

A check of the audit asks this of the configurations that the manifest lists. A session meets others.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

from mlx_audit.evidence.digests import manifest_digest
from mlx_audit.manifests import Manifest

_MOST = 64
_audited: dict[tuple[ModuleType, str, str], frozenset[int]] = {}
"""By module, digest of the manifest, and variant: a tiny model may have to be built for it."""


def unaudited_layers(model: Any, manifest: Manifest, variant: str, arguments: Any) -> list[str]:
    """Return the layers and caches of a model, as labels, that no layer of the variant's tiny model is like.

    Args:
        model: A live model.
        manifest: Of its family.
        variant: That it belongs to.
        arguments: Its own.

    Raises:
        ManifestError: the topology says nothing usable about these arguments.
        TargetError: the tiny configuration does not fit the model.
    """
    if len(manifest.topology.layers) == 1 and not manifest.topology.before:
        return []
    audited = _audited_rules(sys.modules[type(model).__module__], manifest, variant)
    return [
        f"{label}: rule {rule}" for rule, label in _rules(manifest, arguments).items() if rule not in audited
    ]


def _audited_rules(module: ModuleType, manifest: Manifest, variant: str) -> frozenset[int]:
    import mlx.core as mx  # not above: collecting tests, and `list`, import this module and need no MLX

    from mlx_audit.models.build import declared_arguments

    key = (module, manifest_digest(manifest), variant)
    if (found := _audited.get(key)) is None:
        before = _seed()
        try:
            tiny = declared_arguments(module, manifest.variants[variant].tiny, manifest.arguments)
        finally:
            # Random weights are made and thrown away; what the user draws next stays the same.
            mx.random.seed(before)
        if len(_audited) >= _MOST:
            _audited.clear()
        found = _audited[key] = frozenset(_rules(manifest, tiny))
    return found


def _rules(manifest: Manifest, arguments: Any) -> dict[int, str]:
    """Return the rules that a model with these arguments reaches, with a label of one entry each."""
    entries = [*manifest.cache_specs(arguments), *manifest.layer_specs(arguments)]
    return {entry.rule: entry.label() for entry in reversed(entries)}


def _seed() -> int:
    """Return the seed that puts MLX's random state where it is."""
    import mlx.core as mx

    state: Any = mx.random.state  # its stub knows no items
    high, low = state[0].tolist()
    return int(high) << 32 | int(low)
