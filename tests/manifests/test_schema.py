"""The JSON Schema agrees with the loader, and the committed one with the code."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from mlx_audit import resources
from mlx_audit.manifests import load_manifests, manifest_schema


def plain(path: Path) -> Any:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def test_the_schema_is_valid_and_every_field_is_documented() -> None:
    schema = manifest_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    assert schema["additionalProperties"] is False
    undocumented = [
        name for name, body in schema["properties"].items() if not {"description", "$ref"} & set(body)
    ]
    assert undocumented == []


def test_the_committed_schema_is_up_to_date() -> None:
    committed = json.loads((resources.schemas() / "manifest.schema.json").read_text(encoding="utf-8"))
    assert committed == manifest_schema(), "run `make schema`"


def test_shipped_manifests_satisfy_the_schema() -> None:
    validator = jsonschema.Draft202012Validator(manifest_schema())
    for manifest in load_manifests():
        validator.validate(plain(manifest.path))


@pytest.mark.parametrize(
    "name",
    [
        "cache_kind",
        "unknown_key",
        "unknown_variant_key",
        "foreign_parameter",
        "missing_key",
        "missing_parameter",
    ]
    + [
        "expression_too_long",
        "parameter_negative",
        "family_name",
        "module_elsewhere",
        "configuration_outside",
    ]
    + ["exactness", "claim", "rope_kind", "rope_claim", "no_layers"],
)
def test_the_schema_refuses_what_the_loader_refuses(name: str) -> None:
    document = plain(Path(__file__).parent / "broken" / f"{name}.yaml")
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.Draft202012Validator(manifest_schema()).validate(document)
