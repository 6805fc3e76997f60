"""Arguments as a manifest names them, and configurations that building leaves alone."""

from __future__ import annotations

from copy import deepcopy

import pytest

from mlx_audit.errors import TargetError
from mlx_audit.manifests import find_manifest, load_configuration, load_manifests
from mlx_audit.models.build import declared_arguments, resolve_arguments
from mlx_audit.models.modules import import_model
from mlx_audit.models.tiny import shrink

PUBLISHED = [(manifest, name) for manifest in load_manifests() for name in manifest.configurations]


@pytest.mark.parametrize(
    ("family", "name"), [("qwen3_5", "Qwen--Qwen3.5-0.8B"), ("gemma3n", "google--gemma-3n-E4B")]
)
def test_arguments_of_a_nested_configuration_are_those_of_its_text_part(family: str, name: str) -> None:
    manifest = find_manifest(family)
    assert manifest is not None
    config = load_configuration(manifest.configuration_path(name))
    text = config["text_config"]
    arguments = declared_arguments(import_model(manifest.module), config, manifest.arguments)
    assert arguments.num_hidden_layers == text["num_hidden_layers"]
    assert len(manifest.layer_specs(arguments)) == text["num_hidden_layers"]


@pytest.mark.parametrize(("manifest", "name"), PUBLISHED, ids=lambda item: getattr(item, "family", item))
def test_resolving_leaves_the_configuration_as_it_was(manifest, name: str) -> None:  # type: ignore[no-untyped-def]
    config = load_configuration(manifest.configuration_path(name))
    before = deepcopy(config)
    declared_arguments(import_model(manifest.module), config, manifest.arguments)
    assert config == before


def test_a_wrong_path_names_the_key_to_correct() -> None:
    manifest = find_manifest("qwen3_5")
    assert manifest is not None
    with pytest.raises(TargetError, match=r"does not keep its arguments") as caught:
        declared_arguments(
            import_model(manifest.module), manifest.variants["hybrid"].tiny, "language_model.arg"
        )
    assert caught.value.fix == "correct `arguments: language_model.arg`"


def test_the_text_part_of_a_nested_configuration_is_shrunk() -> None:
    manifest = find_manifest("qwen3_5")
    assert manifest is not None
    config = load_configuration(manifest.configuration_path("Qwen--Qwen3.5-0.8B"))
    tiny = shrink(config)
    assert tiny["text_config"]["hidden_size"] == 32
    assert len(tiny["text_config"]["layer_types"]) == tiny["text_config"]["num_hidden_layers"] == 4
    resolve_arguments(import_model(manifest.module), tiny)


def test_a_window_is_shrunk_so_that_it_turns() -> None:
    assert shrink({"hidden_size": 4096, "sliding_window": 4096})["sliding_window"] == 8
    assert shrink({"hidden_size": 4096, "sliding_window": None})["sliding_window"] is None
