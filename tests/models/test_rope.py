"""Which RoPE kind a configuration has, and tiny configurations of another kind."""

from __future__ import annotations

from importlib import import_module

import pytest

from mlx_audit.manifests import Manifest, load_manifests
from mlx_audit.models.build import build_lazy, declared_arguments, resolve_arguments
from mlx_audit.models.rope import rope_kind, with_rope

KINDS = [
    pytest.param(manifest, name, kind, id=f"{manifest.family}-{name}-{kind}")
    for manifest in load_manifests()
    for name in manifest.variants
    for kind in (item.kind for item in manifest.rope)
]


@pytest.mark.parametrize(("manifest", "variant", "kind"), KINDS)
def test_every_declared_kind_can_be_built_from_the_tiny_configuration(
    manifest: Manifest, variant: str, kind: str
) -> None:
    module, tiny = import_module(manifest.module), manifest.variants[variant].tiny
    own = rope_kind(declared_arguments(module, tiny, manifest.arguments))
    config = tiny if kind == own else with_rope(tiny, kind)
    assert rope_kind(declared_arguments(module, config, manifest.arguments)) == kind
    assert build_lazy(module, resolve_arguments(module, config)).layers


def test_the_kind_is_written_where_the_configuration_has_it() -> None:
    flat = with_rope({"hidden_size": 8}, "yarn")
    assert flat["rope_scaling"] == {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 16,
    }
    nested = with_rope({"model_type": "m", "text_config": {"hidden_size": 8}}, "linear")
    assert nested == {
        "model_type": "m",
        "text_config": {"hidden_size": 8, "rope_scaling": {"rope_type": "linear", "factor": 4.0}},
    }
    parameters = {"type": "yarn", "rope_theta": 5.0, "llama_4_scaling_beta": 0.1}
    assert with_rope({"rope_parameters": parameters}, "default") == {
        "rope_parameters": {"rope_type": "default", "rope_theta": 5.0, "llama_4_scaling_beta": 0.1}
    }
    assert parameters["type"] == "yarn"
