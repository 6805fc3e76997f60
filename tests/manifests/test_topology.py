"""From arguments to cache entries and variants."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from mlx_audit.manifests import (
    CacheSpec,
    Manifest,
    ManifestError,
    find_manifest,
    load_configuration,
    load_manifest,
)

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
    assert llama.variants["sliding"].claims.compiled_decode == "undecided"


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_shipped_topologies_are_those_of_the_live_models(family: str) -> None:
    """Tiny models of every variant, built by mlx-lm itself, have the declared entries."""
    from importlib import import_module

    from mlx_lm.models.cache import KVCache, RotatingKVCache, make_prompt_cache

    manifest = find_manifest(family)
    assert manifest is not None
    module = import_module(manifest.module)
    for name, variant in manifest.variants.items():
        model = module.Model(module.ModelArgs.from_dict(variant.tiny))
        live = []
        for entry in make_prompt_cache(model):
            assert isinstance(entry, KVCache | RotatingKVCache)
            ring = isinstance(entry, RotatingKVCache)
            live.append(f"rotating(window={entry.max_size}, keep={entry.keep})" if ring else "linear")
        assert [spec.label() for spec in manifest.cache_specs(model.args)] == live
        assert manifest.variant_for(model.args) == name


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_published_configurations_are_listed_and_described(family: str) -> None:
    from importlib import import_module

    manifest = find_manifest(family)
    assert manifest is not None
    module = import_module(manifest.module)
    index = (manifest.path.parent / "configurations" / "INDEX.tsv").read_text().splitlines()
    listed = {row.split("\t")[0].removesuffix(".json") for row in index[1:] if row.split("\t")[3] == family}
    assert listed == set(manifest.configurations)
    for name in manifest.configurations:
        config = load_configuration(manifest.configuration_path(name))
        resolved = module.ModelArgs.from_dict(config)
        assert manifest.variant_for(resolved) == "full"
        assert len(manifest.cache_specs(resolved)) == config["num_hidden_layers"]
