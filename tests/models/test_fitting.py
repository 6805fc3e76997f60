"""Tiny configurations that are known to run, and what a built model shows of its layers."""

from __future__ import annotations

from typing import Any

import pytest

from mlx_audit.errors import TargetError
from mlx_audit.manifests import find_manifest, load_configuration
from mlx_audit.models.build import build_lazy, resolve_arguments
from mlx_audit.models.fitting import Fitted, fitted_tiny
from mlx_audit.models.modules import import_model
from mlx_audit.models.observed import observe
from mlx_audit.models.tiny import Plan, shrink


def published(family: str, name: str) -> dict[str, Any]:
    manifest = find_manifest(family)
    assert manifest is not None
    return load_configuration(manifest.configuration_path(name))


def fitted(family: str, name: str) -> Fitted:
    module, config = import_model(f"mlx_lm.models.{family}"), published(family, name)
    return fitted_tiny(module, config, observe(build_lazy(module, resolve_arguments(module, config))))


def test_every_form_of_layer_is_kept_and_windows_are_short() -> None:
    tiny = fitted("gpt_oss", "openai--gpt-oss-20b")
    assert not tiny.lacking
    assert [spec.label() for spec in tiny.observed.entries] == ["rotating(window=8, keep=0)", "linear"] * 2
    assert tiny.config["num_local_experts"] == 4


def test_a_pattern_of_letters_keeps_each_letter() -> None:
    tiny = fitted("nemotron_h", "nvidia--Nemotron-H-8B-Base-8K")
    assert set(tiny.config["hybrid_override_pattern"]) == set("M-*")
    assert tiny.observed.count == len(tiny.config["hybrid_override_pattern"]) <= 8
    kinds = [spec.kind for spec in tiny.observed.layers or ()]
    wanted = {"M": "arrays", "*": "linear", "-": "none"}
    assert kinds == [wanted[letter] for letter in tiny.config["hybrid_override_pattern"]]


def test_shared_layers_show_as_layers_without_a_cache() -> None:
    tiny = fitted("gemma3n", "google--gemma-3n-E4B")
    assert tiny.observed.layers is not None
    kinds = [spec.kind for spec in tiny.observed.layers]
    assert set(kinds) == {"rotating", "linear", "none"}
    assert kinds.index("none") == len(tiny.observed.entries)


def test_an_entry_before_the_layers_is_told_from_theirs() -> None:
    manifest = find_manifest("longcat_flash_ngram")
    assert manifest is not None
    module = import_model(manifest.module)
    shown = observe(build_lazy(module, resolve_arguments(module, manifest.variants["full"].tiny)))
    assert [spec.label() for spec in shown.before] == ["arrays(slots=1)"]
    assert shown.layers is not None
    assert len(shown.layers) == shown.count == 2


def test_lists_of_layers_get_the_new_numbers() -> None:
    config = {"hidden_size": 512, "num_hidden_layers": 6, "full_layers": [2, 5], "types": list("abcabc")}
    tiny = shrink(config, Plan(layers=(1, 2, 5)))
    assert (tiny["num_hidden_layers"], tiny["full_layers"], tiny["types"]) == (3, [1, 2], ["b", "c", "c"])


def test_a_tiny_configuration_stays_as_it_is() -> None:
    config = {"hidden_size": 32, "num_hidden_layers": 3, "sliding_window": 16}
    assert shrink(config) == config


def test_what_cannot_run_is_told_with_its_reason() -> None:
    module = import_model("mlx_lm.models.llama")
    config = published("llama", "meta-llama--Llama-3.2-1B")
    real = observe(build_lazy(module, resolve_arguments(module, config)))
    with pytest.raises(TargetError, match="no tiny configuration") as caught:
        fitted_tiny(module, {**config, "hidden_act": 1, "rope_scaling": {"rope_type": "no such"}}, real)
    assert "no such" in str(caught.value.found)
