"""From a file to a Manifest, or to every problem in the file, each with line and column."""

from __future__ import annotations

from pathlib import Path

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from mlx_audit import resources
from mlx_audit.errors import MlxAuditError
from mlx_audit.manifests import modules, semantics
from mlx_audit.manifests.kinds import KINDS, StrictModel
from mlx_audit.manifests.problems import ManifestError, Problem, display, shown
from mlx_audit.manifests.schema import PATTERNS, Claims, Manifest, Topology, Variant
from mlx_audit.manifests.suggestions import did_you_mean
from mlx_audit.manifests.yaml_nodes import Document, Location, read_document


def load_manifest(path: Path) -> Manifest:
    """Read and check one manifest; ManifestError carries all its problems."""
    document = read_document(path, display(path))
    manifest = None
    try:
        manifest = Manifest.model_validate(document.value)
    except ValidationError as error:
        for details in error.errors(include_url=False):
            _note(document, details)
    semantics.check(document, path.parent)
    document.raise_problems()
    assert manifest is not None, "a validation error without a problem"
    manifest._path = path
    manifest._document = document
    return manifest


def load_manifests(folder: Path | None = None) -> list[Manifest]:
    """Read all manifests of a folder, sorted by file name; problems of all files are raised together."""
    folder = resources.model_audits() if folder is None else folder
    if not folder.is_dir():
        raise MlxAuditError("no such folder of manifests", where=str(folder))
    manifests: list[Manifest] = []
    problems: list[Problem] = []
    for path in sorted(folder.glob("*.yaml")):
        try:
            manifests.append(load_manifest(path))
        except ManifestError as error:
            problems += error.problems
    problems += duplicates(manifests)
    if problems:
        raise ManifestError(problems)
    return manifests


def duplicates(manifests: list[Manifest]) -> list[Problem]:
    """A problem for each manifest that describes a family or module which an earlier one has."""
    first: dict[tuple[str, object], Manifest] = {}
    found: list[Problem] = []
    for manifest in manifests:
        keys = {
            "family": manifest.family,
            "module": modules.module_key(manifest.path.parent, manifest.module),
        }
        for key, value in keys.items():
            earlier = first.setdefault((key, value), manifest)
            if earlier is not manifest:
                document = Document(manifest._document.file, values=manifest._document.values)
                document.add(
                    (key,),
                    f"another manifest has this {key}",
                    found=shown(str(value)),
                    fix=f"see {display(earlier.path)}",
                )
                found += document.problems
    return found


def find_manifest(family_or_module: str, folder: Path | None = None) -> Manifest | None:
    """The manifest of a family, given its name or its full module path; None when there is none."""
    for manifest in load_manifests(folder):
        if family_or_module in (manifest.family, manifest.module):
            return manifest
    return None


def _note(document: Document, error: ErrorDetails) -> None:
    """Turn one of pydantic's errors into a Problem."""
    location, kind, context = _without_tags(document, error["loc"]), error["type"], error.get("ctx", {})
    found, what = shown(error["input"]), error["msg"]
    match kind:
        case "extra_forbidden":
            key, known = str(location[-1]), _known_keys(error["loc"])
            fix = did_you_mean(key, known)
            allowed = ", ".join(known)
            document.add(location, "unknown key", key=True, found=shown(key), allowed=allowed, fix=fix)
        case "missing":
            document.add(location[:-1], f"the key {location[-1]!r} is missing", fix=f"add `{location[-1]}:`")
        case "union_tag_invalid":
            _note_choice(document, (*location, "cache"), "unknown cache kind", context["tag"], list(KINDS))
        case "union_tag_not_found":
            document.add(location, "the key 'cache' is missing", allowed=", ".join(KINDS), fix="add `cache:`")
        case "literal_error":
            choices = [part.strip("'") for part in context["expected"].replace(" or ", ", ").split(", ")]
            _note_choice(document, location, "not one of the choices", error["input"], choices)
        case "string_pattern_mismatch":
            allowed = PATTERNS[context["pattern"]]
            document.add(location, "not a valid name here", found=found, allowed=allowed)
        case "model_type" | "model_attributes_type":
            document.add(location, "not a mapping", found=found, allowed="keys and values")
        case _:
            _note_other(document, location, what, found, context)


def _note_choice(
    document: Document, location: Location, what: str, value: object, choices: list[str]
) -> None:
    document.add(
        location, what, found=shown(value), allowed=", ".join(choices), fix=did_you_mean(value, choices)
    )


def _note_other(
    document: Document, location: Location, what: str, found: str, context: dict[str, object]
) -> None:
    """Errors raised by the schema's own validators, whose context says the rest, and pydantic's plain ones."""
    location = tuple(context["location"]) if "location" in context else location  # type: ignore[arg-type]
    location = (*location, str(context["key"])) if "key" in context else location
    column = context.get("column")
    shown_value = str(context["found"]) if context.get("found") is not None else found
    if "location" in context:
        shown_value = str(location[-1])
    document.add(
        location,
        what[:1].lower() + what[1:],
        offset=column - 1 if isinstance(column, int) else None,
        found=shown_value,
        allowed=None if context.get("allowed") is None else str(context["allowed"]),
        fix=None if context.get("fix") is None else str(context["fix"]),
    )


def _without_tags(document: Document, location: tuple[str | int, ...]) -> Location:
    """Pydantic's location without its own marks: tags of unions, and `[key]` for a mapping's key."""
    kept: Location = ()
    for at, part in enumerate(location):
        last = at == len(location) - 1
        if (*kept, part) in document.values or (last and part != "[key]" and part not in KINDS):
            kept = (*kept, part)
    return kept


def _known_keys(location: tuple[str | int, ...]) -> list[str]:
    """The keys of the model that refused the last part of a location."""
    owner: type[StrictModel] = Manifest
    if len(location) > 2 and location[-3] == "variants":
        owner = Variant
    elif len(location) > 1:
        owners: dict[str, type[StrictModel]] = {"topology": Topology, "claims": Claims, **KINDS}
        owner = owners[str(location[-2])]
    return list(owner.model_fields)


__all__ = ["duplicates", "find_manifest", "load_manifest", "load_manifests"]
