"""Each RoPE kind that a manifest declares is really another rotation in the model that is built."""

from __future__ import annotations

import itertools
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models import rope_utils

from mlx_audit.manifests import Manifest, load_manifests
from mlx_audit.models.build import build_lazy, declared_arguments, resolve_arguments
from mlx_audit.models.modules import import_model
from mlx_audit.models.rope import rope_kind, with_rope

WITH_KINDS = [
    (manifest, name) for manifest in load_manifests() for name in manifest.variants if manifest.rope
]
WITHOUT_KINDS = [manifest for manifest in load_manifests() if not manifest.rope]

ROPES: tuple[type[nn.Module], ...] = (
    nn.RoPE,
    *(
        value
        for value in vars(rope_utils).values()
        if isinstance(value, type) and value.__name__.endswith("RoPE")
    ),
)

SAME = {frozenset(("default", "mrope"))}
"""Kinds between which mlx-lm makes no difference: positions of text are one number."""


def rotations(model: nn.Module) -> list[tuple[str, dict[str, Any]]]:
    """Return what decides each layer's rotation: the class, its numbers, and its table of frequencies."""
    found = [module for _, module in model.named_modules() if isinstance(module, ROPES)]
    return [
        (
            type(module).__name__,
            {
                name: value.tolist() if isinstance(value, mx.array) else value
                for name, value in [*vars(module).items(), *module.items()]
            },
        )
        for module in found
    ]


def built(manifest: Manifest, config: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    module = import_model(manifest.module)
    return rotations(build_lazy(module, resolve_arguments(module, config)))


def config_of_kind(manifest: Manifest, variant: str, kind: str) -> dict[str, Any]:
    """Return the configuration that an audit takes for a kind."""
    module, tiny = import_model(manifest.module), manifest.variants[variant].tiny
    own = rope_kind(declared_arguments(module, tiny, manifest.arguments))
    return dict(tiny) if own == kind else with_rope(tiny, kind)


@pytest.mark.parametrize(("manifest", "variant"), WITH_KINDS, ids=lambda item: getattr(item, "family", item))
def test_each_kind_of_a_manifest_is_another_rotation(manifest: Manifest, variant: str) -> None:
    of_kind = {
        item.kind: built(manifest, config_of_kind(manifest, variant, item.kind)) for item in manifest.rope
    }
    assert all(of_kind.values()), "a model without a RoPE module has no kinds"
    for pair in itertools.combinations(of_kind, 2):
        if frozenset(pair) not in SAME:
            assert of_kind[pair[0]] != of_kind[pair[1]], pair


@pytest.mark.parametrize("manifest", WITHOUT_KINDS, ids=lambda manifest: manifest.family)
def test_without_kinds_there_is_one_rotation_whatever_is_asked_for(manifest: Manifest) -> None:
    for variant in manifest.variants.values():
        asked = with_rope(variant.tiny, "linear")
        assert built(manifest, asked) == built(manifest, dict(variant.tiny))


@pytest.mark.parametrize("kind", ["default", "linear", "yarn", "llama3", "longrope"])
def test_the_text_part_s_parameters_keep_what_is_not_scaling(kind: str) -> None:
    others = {"mrope_section": [2, 1, 1], "rope_theta": 5.0, "partial_rotary_factor": 0.5}
    changed = with_rope({"text_config": {"rope_parameters": {"rope_type": "default", **others}}}, kind)
    assert rope_kind(changed) == kind
    assert others.items() <= changed["text_config"]["rope_parameters"].items()


def test_names_that_mean_the_same() -> None:
    assert rope_kind({"rope_scaling": {"type": "deepseek_yarn"}}) == "yarn"
    assert rope_kind({"rope_scaling": {"type": "default", "rope_type": "yarn"}}) == "default"
    nested = {"rope_scaling": None, "text_config": {"rope_scaling": {"rope_type": "linear"}}}
    assert rope_kind(nested) == "linear"
    assert rope_kind({}) == "default"
