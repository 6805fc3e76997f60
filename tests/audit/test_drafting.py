"""Drafted topologies against the shipped ones, which people wrote by reading."""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType
from typing import Any

import pytest

from mlx_audit.audit.drafting_topology import Found, _require, find_topology
from mlx_audit.manifests import CacheSpec, Manifest, load_configuration, load_manifests
from mlx_audit.manifests.evaluation import names_of
from mlx_audit.manifests.observations import Observation, Unexplained
from mlx_audit.manifests.rules import Rules
from mlx_audit.manifests.schema import Topology
from mlx_audit.manifests.topology import cache_specs
from mlx_audit.models.build import build_lazy, declared_arguments, resolve_arguments
from mlx_audit.models.fitting import fitted_tiny
from mlx_audit.models.modules import import_model
from mlx_audit.models.observed import observe

QUICK = ("baichuan_m1", "gemma3_text", "gpt_oss", "lfm2", "nemotron_h", "recurrent_gemma")
MANIFESTS = {manifest.family: manifest for manifest in load_manifests()}


def configurations(manifest: Manifest) -> list[dict[str, Any]]:
    """Return a family's published configurations; the tiny ones where there are none."""
    found = [load_configuration(manifest.configuration_path(name)) for name in manifest.configurations]
    return found or [dict(variant.tiny) for variant in manifest.variants.values()]


def drafted(module: ModuleType, config: Mapping[str, Any]) -> Found:
    real = observe(build_lazy(module, resolve_arguments(module, config)))
    return find_topology(module, config, real, fitted_tiny(module, config, real))


def specs_of(found: Found, module: ModuleType, config: Mapping[str, Any]) -> list[CacheSpec]:
    rules = found.rules
    topology = Topology.model_validate({"count": rules.count, "before": rules.before, "layers": rules.layers})
    return cache_specs(topology, names_of(declared_arguments(module, config, found.arguments)))


@pytest.mark.parametrize(
    "family",
    [pytest.param(name, marks=() if name in QUICK else (pytest.mark.nightly,)) for name in MANIFESTS],
)
def test_a_draft_gives_what_the_shipped_manifest_gives(family: str) -> None:
    manifest = MANIFESTS[family]
    module = import_model(manifest.module)
    first, *others = configurations(manifest)
    found = drafted(module, first)

    def variant(config: Mapping[str, Any]) -> str | None:
        return manifest.variant_for(declared_arguments(module, config, manifest.arguments))

    for config in (first, *(other for other in others if variant(other) == variant(first))):
        arguments = declared_arguments(module, config, manifest.arguments)
        assert specs_of(found, module, config) == manifest.cache_specs(arguments)


def test_rules_that_do_not_give_the_live_caches_are_refused() -> None:
    ring = CacheSpec("rotating", (("window", 8), ("keep", 0)))
    seen = Observation("it", {"num_hidden_layers": 2}, [ring, ring], 2, [ring, ring])
    _require(Rules("num_hidden_layers", [{"cache": "rotating", "window": 8, "keep": 0}]), [seen])
    with pytest.raises(Unexplained, match="do not hold everywhere"):
        _require(Rules("num_hidden_layers", [{"cache": "linear"}]), [seen])
