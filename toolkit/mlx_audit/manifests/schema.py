"""What a manifest may say: pydantic models, each field with its meaning, unit and source."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from pydantic import (
    AfterValidator,
    Field,
    JsonValue,
    PlainValidator,
    PrivateAttr,
    WithJsonSchema,
)
from pydantic_core import PydanticCustomError

from mlx_audit.errors import MlxAuditError
from mlx_audit.manifests import topology as _topology
from mlx_audit.manifests.evaluation import evaluate_condition, names_of
from mlx_audit.manifests.files import real
from mlx_audit.manifests.kinds import Condition, Parameter, Rule, StrictModel
from mlx_audit.manifests.problems import ManifestError
from mlx_audit.manifests.suggestions import did_you_mean
from mlx_audit.manifests.syntax import ExpressionError
from mlx_audit.manifests.topology import CacheSpec, TopologyError
from mlx_audit.manifests.yaml_nodes import Document

Exactness = Literal["exact", "reordered", "kernel"]
Verdict = Literal["capable", "limited", "not-capable", "undecided"]
RopeKindName = Literal["default", "linear", "llama3", "yarn", "longrope", "dynamic", "proportional", "mrope"]
RopeClaim = Literal["capable", "undecided"]

ROPE_KINDS: tuple[str, ...] = get_args(RopeKindName)
ROPE_CLAIMS: tuple[str, ...] = get_args(RopeClaim)
_NAME = r"^[A-Za-z0-9_-]{1,64}$"
_MODULE = r"^(mlx_lm\.models\.[A-Za-z][A-Za-z0-9_-]*|\./[A-Za-z0-9_.-]+\.py)$"
_PATH = r"^[A-Za-z][A-Za-z0-9_]*(\.[A-Za-z][A-Za-z0-9_]*){0,5}$"
_CONFIGURATION = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$"

MODULE = re.compile(_MODULE)
CONFIGURATION = re.compile(_CONFIGURATION)
PATTERNS = {
    _NAME: "letters, digits, - and _, at most 64",
    _MODULE: "mlx_lm.models.<name>, or ./<file>.py beside the manifest",
    _PATH: "attribute names joined by dots",
    _CONFIGURATION: "letters, digits, '.', - and _: the name of a file in configurations/, without .json",
}
"""What the patterns mean, for messages."""

Name = Annotated[str, Field(pattern=_NAME)]
Text = Annotated[str, Field(min_length=1, max_length=1000)]
ConfigurationName = Annotated[str, Field(pattern=_CONFIGURATION)]


class RopeKind(StrictModel):
    """A kind of rotary position embedding, and the claim about it."""

    kind: RopeKindName
    claim: RopeClaim


def _rope(value: Any) -> RopeKind:
    if isinstance(value, RopeKind):
        return value
    if isinstance(value, dict) and len(value) == 1:
        kind, claim = next(iter(value.items()))
    else:
        kind, claim = value, "capable"
    if not isinstance(kind, str) or kind not in ROPE_KINDS:
        details = {"found": kind, "allowed": ", ".join(ROPE_KINDS), "fix": did_you_mean(kind, ROPE_KINDS)}
        raise PydanticCustomError("rope_kind", "not a RoPE kind", details)
    if claim not in ROPE_CLAIMS:
        details = {"found": claim, "allowed": ", ".join(ROPE_CLAIMS), "fix": did_you_mean(claim, ROPE_CLAIMS)}
        raise PydanticCustomError("rope_claim", "not a claim about a RoPE kind", details)
    return RopeKind.model_validate({"kind": kind, "claim": claim})


def _specifier(value: str) -> str:
    try:
        SpecifierSet(value)
    except InvalidSpecifier:
        details = {"found": value, "allowed": 'version specifiers such as ">=0.32.2,<0.33"'}
        raise PydanticCustomError("specifier", "not a version specifier", details) from None
    return value


_ROPE_KIND_SCHEMA = {"enum": list(ROPE_KINDS)}
Rope = Annotated[
    RopeKind,
    PlainValidator(_rope),
    WithJsonSchema(
        {
            "anyOf": [
                _ROPE_KIND_SCHEMA,
                {
                    "type": "object",
                    "propertyNames": _ROPE_KIND_SCHEMA,
                    "additionalProperties": {"enum": list(ROPE_CLAIMS)},
                    "minProperties": 1,
                    "maxProperties": 1,
                },
            ]
        }
    ),
]
Specifier = Annotated[str, Field(min_length=1), AfterValidator(_specifier)]


class Topology(StrictModel):
    """Which cache each layer keeps."""

    count: Parameter = Field(description="How many layers there are; `i` runs over 0 … count-1.")
    before: list[Rule] = Field(
        default=[], max_length=64, description="Entries that come before the layers' and belong to no layer."
    )
    layers: list[Rule] = Field(
        min_length=1, max_length=64, description="Rules; for each layer the first one whose `when` holds."
    )


class Claims(StrictModel):
    """What is claimed of a variant; an audit confirms or refutes it."""

    compiled_decode: Verdict = Field(
        description="Decoding one token at a time in one compiled graph is right."
    )
    prefix_restore: Verdict | None = Field(
        default=None, description="Going on from a restored prefix equals the cold run, leaf by leaf."
    )


class Variant(StrictModel):
    """A family under a condition on its configuration; claims belong to variants."""

    when: Condition | None = Field(
        default=None,
        description="Condition over the arguments; without it the variant covers all that is left.",
    )
    exactness: Exactness = Field(
        description="On the CPU, against eager. exact: 0.0; reordered: same terms, other order; kernel: other kernel."
    )
    tiny: dict[str, JsonValue] = Field(
        min_length=1,
        description="Arguments of a model for the numeric tier: every layer kind, windows small enough to wrap twice.",
    )
    claims: Claims
    limits: list[Text] = Field(
        default=[], description="What a `limited` variant does not do, one sentence each."
    )


class Manifest(StrictModel):
    """One model family: where its code is, which caches it keeps, and what is claimed of it."""

    family: Name = Field(description="The family's name, as the command line takes it.")
    module: str = Field(
        pattern=_MODULE, description="Module under mlx_lm.models, or ./file.py beside the manifest."
    )
    about: Text = Field(description="One sentence on what sets the family apart.")
    sources: list[Text] = Field(min_length=1, description="Where each statement was read: file and symbol.")
    arguments: str = Field(
        default="args", pattern=_PATH, description="Path from the built model to its resolved arguments."
    )
    topology: Topology
    rope: list[Rope] = Field(
        default=[], description="RoPE kinds to audit, one trace each; `kind: undecided` is only reported."
    )
    variants: dict[Name, Variant] = Field(
        min_length=1, description="Variants by name; the first one whose `when` holds covers a configuration."
    )
    configurations: list[ConfigurationName] = Field(
        default=[],
        description="Published configurations: configurations/<name>.json beside the manifest, most telling first.",
    )
    requires: dict[Annotated[str, Field(pattern=_CONFIGURATION)], Specifier] = Field(
        default={}, description="Versions of packages that the statements were read in, as specifiers."
    )

    _path: Path = PrivateAttr(default=Path())
    _document: Document = PrivateAttr(default_factory=lambda: Document("manifest"))

    @property
    def path(self) -> Path:
        """The file that the manifest was read from."""
        return self._path

    @property
    def rope_kinds(self) -> list[str]:
        """The kinds to audit, in the manifest's order; those only reported as undecided are left out."""
        return [item.kind for item in self.rope if item.claim == "capable"]

    def rope_claim(self, kind: str) -> RopeClaim | None:
        """The claim about a RoPE kind; None when the manifest does not name it."""
        return next((item.claim for item in self.rope if item.kind == kind), None)

    def variant_for(self, arguments: object) -> str | None:
        """The name of the variant that covers a model with these resolved arguments, or None."""
        names = names_of(arguments)
        for name, variant in self.variants.items():
            try:
                if variant.when is None or evaluate_condition(variant.when, names):
                    return name
            except ExpressionError as error:
                raise self._located(("variants", name, "when"), error) from error
        return None

    def cache_specs(self, arguments: object) -> list[CacheSpec]:
        """The cache entries in `make_cache()` order: those of `before`, then one a layer that keeps a cache."""
        try:
            return _topology.cache_specs(self.topology, arguments)
        except TopologyError as error:
            raise self._located(error.location, error) from error

    def layer_specs(self, arguments: object) -> list[CacheSpec]:
        """One entry a layer, those of kind `none` included."""
        try:
            return _topology.layer_specs(self.topology, arguments)
        except TopologyError as error:
            raise self._located(error.location, error) from error

    def configuration_path(self, name: str) -> Path:
        """The file of a configuration; it cannot lie outside the folder `configurations` beside the manifest."""
        return configuration_path(self.path.parent, name)

    def _located(
        self, location: tuple[str | int, ...], error: ExpressionError | TopologyError
    ) -> ManifestError:
        located = Document(self._document.file, values=self._document.values, keys=self._document.keys)
        found = None if error.found is None else str(error.found)
        allowed = None if error.allowed is None else str(error.allowed)
        located.add(
            location, error.what, offset=error.column - 1, found=found, allowed=allowed, fix=error.fix
        )
        return ManifestError(located.problems)


def configuration_path(folder: Path, name: str) -> Path:
    """`folder/configurations/<name>.json`; MlxAuditError when that name leads out of the folder."""
    base = real(folder) / "configurations"
    path = base / f"{name}.json"
    if not CONFIGURATION.fullmatch(name) or real(path).parent != real(base):
        raise MlxAuditError(
            "the configuration lies outside its folder",
            found=repr(name),
            allowed="the name of a file in configurations/, without .json",
        )
    return path


def manifest_schema() -> dict[str, Any]:
    """The JSON Schema of manifests, for editors and for `schemas/manifest.schema.json`."""
    schema = Manifest.model_json_schema()
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **schema,
        "title": "mlx-audit manifest",
    }
