"""A draft as text: what it says comes back, and foreign text stays where it belongs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from mlx_audit.manifests import load_manifest
from mlx_audit.manifests.drafting import Draft, manifest_text

TINY: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 32,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1e16,
    "hidden_act": "no",
    "tie_word_embeddings": True,
    "rope_scaling": {"factor": 4.0, "rope_type": "yarn", "a": 1, "b": None, "c": [1, 2.5, "x y"]},
    "layer_types": ["sliding_attention", "full_attention"] * 8,
    "empty": {},
}


def draft(**changes: Any) -> Draft:
    values: dict[str, Any] = {
        "family": "mine",
        "module": "mlx_lm.models.llama",
        "about": 'Says "so": and more.',
        "sources": ["mlx_lm/models/llama.py:12 ModelArgs"],
        "arguments": "args",
        "count": "num_hidden_layers",
        "layers": [{"when": "layer_types[i] == 'full_attention'", "cache": "linear"}, {"cache": "none"}],
        "rope": ["default"],
        "variant": "full",
        "exactness": "exact",
        "tiny": {"model_type": "llama", "hidden_size": 32},
        "requires": {"mlx-lm": ">=0.32.2"},
    }
    return Draft(**{**values, **changes})


def test_every_value_comes_back() -> None:
    read = yaml.safe_load(manifest_text(draft(tiny=TINY)))
    assert read["variants"]["full"]["tiny"] == TINY
    assert read["about"] == 'Says "so": and more.'
    assert read["topology"]["layers"][0]["when"] == "layer_types[i] == 'full_attention'"


def test_it_loads_and_begins_with_the_schema(tmp_path: Path) -> None:
    text = manifest_text(draft())
    assert text.startswith("# yaml-language-server: $schema=")
    file = tmp_path / "mine.yaml"
    file.write_text(text, encoding="utf-8")
    assert load_manifest(file).variants["full"].claims.compiled_decode == "undecided"


def test_the_same_draft_gives_the_same_bytes() -> None:
    assert manifest_text(draft(tiny=TINY)) == manifest_text(draft(tiny=TINY))


def test_infinity_becomes_a_number() -> None:
    read = yaml.safe_load(manifest_text(draft(tiny={"limit": [0.0, float("inf")]})))
    assert read["variants"]["full"]["tiny"]["limit"] == [0.0, 1e308]


def test_foreign_text_cannot_leave_its_comment_or_string() -> None:
    harm = 'x\nfamily: other\r\u2028# "\\'
    text = manifest_text(draft(notes={"claims": [harm], "sources": [harm * 40]}, about=harm))
    assert yaml.safe_load(text)["family"] == "mine"
    assert all(line.lstrip().startswith("#") or "x" not in line[:1] for line in text.splitlines())


def test_remarks_stand_above_the_key_that_they_concern() -> None:
    lines = manifest_text(
        draft(notes={"claims": ["SRC001 here"], "layers": ["no rule"], "rope": ["dynamic"]})
    ).splitlines()
    for remark, key in (("SRC001 here", "claims:"), ("no rule", "layers:"), ("dynamic", "rope:")):
        at = next(n for n, line in enumerate(lines) if line.strip() == f"# {remark}")
        assert lines[at + 1].strip().startswith(key)
