"""From arguments to cache entries and variants."""

from __future__ import annotations

from collections import Counter
from csv import DictReader
from importlib import import_module
from operator import attrgetter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mlx_audit.manifests import (
    CacheSpec,
    Manifest,
    ManifestError,
    find_manifest,
    load_configuration,
    load_manifest,
    load_manifests,
)
from mlx_audit.models.build import declared_arguments, resolve_arguments
from mlx_audit.models.live import live_specs

HYBRID = """\
family: hybrid
module: ./hybrid.py
about: Every kind of cache, for tests.
sources: [tests]
topology:
  count: count
  before:
    - {cache: linear}
    - {when: extra, cache: arrays, slots: 1}
  layers:
    - {when: "kinds[i] == 'none'", cache: none}
    - {when: "kinds[i] == 'ring'", cache: rotating, window: "window - 1", keep: 4}
    - {when: "kinds[i] == 'state'", cache: arrays, slots: 2}
    - {when: "kinds[i] == 'chunk'", cache: chunked, chunk: window}
    - {when: "kinds[i] == 'small'", cache: quantized, bits: 4, group_size: 32}
    - {when: "kinds[i] == 'both'", cache: composite, of: [{cache: arrays, slots: 1}, {cache: rotating, window: i}]}
rope: [default, yarn, {dynamic: undecided}, {llama3: capable}]
variants:
  even: {when: "count % 2 == 0", exactness: exact, tiny: {count: 2}, claims: {compiled_decode: capable}}
  small: {when: "window < 4", exactness: kernel, tiny: {count: 1}, claims: {compiled_decode: undecided}}
"""


@pytest.fixture
def hybrid(tmp_path: Path) -> Manifest:
    (tmp_path / "hybrid.py").write_text("")
    (tmp_path / "hybrid.yaml").write_text(HYBRID)
    return load_manifest(tmp_path / "hybrid.yaml")


def arguments(*kinds: str, window: object = 9, extra: bool = False) -> dict[str, object]:
    return {"count": len(kinds), "kinds": list(kinds), "window": window, "extra": extra}


def test_entries_come_in_the_order_of_make_cache(hybrid: Manifest) -> None:
    specs = hybrid.cache_specs(arguments("ring", "none", "state", "chunk", "small", "both", extra=True))
    assert [spec.label() for spec in specs] == [
        "linear",
        "arrays(slots=1)",
        "rotating(window=8, keep=4)",
        "arrays(slots=2)",
        "chunked(chunk=9)",
        "quantized(bits=4, group_size=32)",
        "composite(arrays(slots=1), rotating(window=5, keep=0))",
    ]
    assert [spec.rule for spec in specs] == [-1, -2, 1, 2, 3, 4, 5]


def test_layers_keep_their_place_even_without_a_cache(hybrid: Manifest) -> None:
    specs = hybrid.layer_specs(arguments("ring", "none", "state"))
    assert [spec.kind for spec in specs] == ["rotating", "none", "arrays"]


def test_specs_compare_by_kind_and_parameters() -> None:
    assert CacheSpec("rotating", (("window", 8),), rule=1) == CacheSpec("rotating", (("window", 8),), rule=2)
    assert CacheSpec("rotating", (("window", 8),)) != CacheSpec("rotating", (("window", 9),))


@pytest.mark.parametrize(
    ("given", "place", "message"),
    [
        (arguments("odd"), "11:5", "no rule holds for layer 0"),
        (arguments("ring", window=0), "12:69", "not a count, at layer 0; found: -1"),
        (
            arguments("none", "ring", window=None),
            "12:69",
            "arithmetic on a value that is not an integer, at layer 1",
        ),
        ({"kinds": []}, "6:10", "unknown name; found: count"),
        ({**arguments(), "count": 5000}, "6:10", "too many layers; found: 5000"),
    ],
)
def test_topologies_that_fit_no_arguments_name_their_place(
    hybrid: Manifest, given: dict[str, object], place: str, message: str
) -> None:
    with pytest.raises(ManifestError) as caught:
        hybrid.cache_specs({"extra": False, **given})
    assert f"hybrid.yaml:{place}: {message}" in str(caught.value)


def test_the_first_variant_that_holds_is_taken(hybrid: Manifest) -> None:
    assert hybrid.variant_for(SimpleNamespace(count=2, window=1)) == "even"
    assert hybrid.variant_for({"count": 1, "window": 1}) == "small"
    assert hybrid.variant_for({"count": 1, "window": 4}) is None
    with pytest.raises(ManifestError, match=r"hybrid\.yaml:20:25: < of a value that is not a number"):
        hybrid.variant_for({"count": 1, "window": None})


def test_rope_claims(hybrid: Manifest) -> None:
    assert hybrid.rope_kinds == ["default", "yarn", "llama3"]
    assert [hybrid.rope_claim(kind) for kind in ("yarn", "dynamic", "mrope")] == [
        "capable",
        "undecided",
        None,
    ]


def test_llama_variants_follow_the_layer_types() -> None:
    llama = find_manifest("llama")
    assert llama is not None
    plain = {"layer_types": ["full_attention"] * 3, "sliding_window": 4096}
    mixed = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8}
    assert (llama.variant_for(plain), llama.variant_for(mixed)) == ("full", "sliding")
    assert [spec.label() for spec in llama.cache_specs(plain)] == ["linear"] * 3
    assert [spec.label() for spec in llama.cache_specs(mixed)] == ["rotating(window=8, keep=0)", "linear"]
    assert llama.variants["full"].claims.compiled_decode == "capable"
    assert llama.variants["sliding"].claims.compiled_decode == "capable"


NATIVE = {
    "KVCache": "linear",
    "RotatingKVCache": "rotating",
    "ArraysCache": "arrays",
    "ChunkedKVCache": "chunked",
    "CacheList": "composite",
}
"""mlx-lm's classes, as the index of configurations names them."""


def arguments_of(manifest: Manifest, config: dict[str, Any]) -> Any:
    return declared_arguments(import_module(manifest.module), config, manifest.arguments)


@pytest.mark.parametrize("manifest", load_manifests(), ids=lambda manifest: manifest.family)
def test_shipped_topologies_are_those_of_the_live_models(manifest: Manifest) -> None:
    """Tiny models of every variant, built by mlx-lm itself, have the declared entries and fall under their variant."""
    module = import_module(manifest.module)
    for name, variant in manifest.variants.items():
        model = module.Model(resolve_arguments(module, variant.tiny))
        arguments = attrgetter(manifest.arguments)(model)
        assert manifest.cache_specs(arguments) == live_specs(model)
        assert manifest.variant_for(arguments) == name
        assert manifest.variant_for(arguments_of(manifest, variant.tiny)) == name


@pytest.mark.parametrize("manifest", load_manifests(), ids=lambda manifest: manifest.family)
def test_published_configurations_are_listed_and_described(manifest: Manifest) -> None:
    """The index says which module serves a file, and which caches mlx-lm gives it; a manifest names all of its own."""
    module = manifest.module.rpartition(".")[2]
    text = (manifest.path.parent / "configurations" / "INDEX.tsv").read_text(encoding="utf-8")
    own = [row for row in DictReader(text.splitlines(), delimiter="\t") if row["mlx_lm_module"] == module]
    assert {row["file"].removesuffix(".json") for row in own} == set(manifest.configurations)
    for row in own:
        config = load_configuration(manifest.configuration_path(row["file"].removesuffix(".json")))
        arguments = arguments_of(manifest, config)
        assert manifest.variant_for(arguments) in manifest.variants
        entries = Counter(spec.kind for spec in manifest.cache_specs(arguments))
        described = [part.rsplit("*", 1) for part in row["prompt_cache"].split(",")]
        assert entries == {NATIVE[name.partition("(")[0]]: int(count) for name, count in described}
