"""A record speaks of the layers that the audited tiny model has; a session meets models with others."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path

import mlx.core as mx
import pytest
import yaml

from evidence.conftest import every_check, result_of
from mlx_audit import resources
from mlx_audit.errors import NotCompileCapable
from mlx_audit.evidence import identify, require_capable
from mlx_audit.evidence.environment import backend
from mlx_audit.evidence.reached import _audited, unaudited_layers
from mlx_audit.evidence.records import make_record, write_record
from mlx_audit.manifests import find_manifest, load_manifest
from mlx_audit.models.build import build_tiny, resolve_arguments
from mlx_audit.models.modules import import_file
from model_files import write_model
from tiny_models import config_of, module_of

WINDOWS = {
    "layer_types": ["full_attention", "sliding_attention", "full_attention", "full_attention"],
    "sliding_window": 8,
}


def test_a_session_refuses_a_kind_of_layer_that_the_tiny_model_hides(tmp_path: Path) -> None:
    """One variant that catches all: its tiny model has no window, and no configuration with one is listed."""
    module = import_file(write_model(tmp_path, "mine"))
    stated = yaml.safe_load((resources.model_audits() / "llama.yaml").read_text(encoding="utf-8"))
    full = stated["variants"]["full"]
    del stated["configurations"], full["when"]
    path = tmp_path / "mine.yaml"
    own = {"family": "mine", "module": "./mine.py", "variants": {"full": full}}
    path.write_text(yaml.safe_dump({**stated, **own}), encoding="utf-8")
    record = make_record(load_manifest(path), [result_of(*every_check())], backend(), version("mlx"))
    write_record(record, tmp_path / "records")
    plain, windows = (
        build_tiny(module, resolve_arguments(module, config_of("llama", **changes)), seed=0)
        for changes in ({}, WINDOWS)
    )
    require_capable(plain, records=tmp_path / "records")
    with pytest.raises(NotCompileCapable) as caught:
        require_capable(windows, records=tmp_path / "records")
    assert "layers of a kind that the audited one has not" in caught.value.what
    assert caught.value.found == "rotating(window=8, keep=0): rule 0"
    assert caught.value.where == "mine.yaml: variants.full.tiny"


def test_the_variants_of_a_shipped_family_have_what_their_tiny_models_have() -> None:
    module = module_of("llama")
    for changes in ({}, WINDOWS):
        model = build_tiny(module, resolve_arguments(module, config_of("llama", **changes)), seed=0)
        manifest, variant, arguments = identify(model)
        assert unaudited_layers(model, manifest, variant, arguments) == []
    assert unaudited_layers(model, manifest, "full", arguments) == ["rotating(window=8, keep=0): rule 0"]


def test_random_numbers_stay_as_they_are_though_a_model_is_built() -> None:
    """The arguments of this family are known only when its model is built, with random weights."""
    manifest = find_manifest("gemma3n")
    assert manifest is not None
    module = module_of("gemma3n")
    config = manifest.variants["shared"].tiny
    model = build_tiny(module, resolve_arguments(module, config), seed=0)
    _, variant, arguments = identify(model)
    mx.random.seed(7)
    wanted = mx.random.uniform(shape=(4,)).tolist()
    mx.random.seed(7)
    _audited.clear()
    assert unaudited_layers(model, manifest, variant, arguments) == []
    assert _audited, "it was looked for"
    assert mx.random.uniform(shape=(4,)).tolist() == wanted
