"""May this very model run compiled decoding here? The rule that sessions and the gate share."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, NamedTuple

from mlx_audit.errors import NotCompileCapable
from mlx_audit.evidence.conditions import is_met
from mlx_audit.evidence.environment import backend
from mlx_audit.evidence.live_code import foreign_code, own_file
from mlx_audit.evidence.reached import unaudited_layers
from mlx_audit.evidence.records import search_path
from mlx_audit.evidence.registered import adapter_digest
from mlx_audit.evidence.stamps import warn_of_stale_stamp
from mlx_audit.evidence.standing import Evidence, Standing, evidence_of, rope_standing, standing
from mlx_audit.manifests import Manifest, find_manifest, load_manifest
from mlx_audit.models.rope import rope_kind

_MOST_BYTES = 1 << 20
"""Of a YAML file that may be a manifest."""


class Identity(NamedTuple):
    """What a model is, in the words of a manifest."""

    manifest: Manifest
    variant: str
    arguments: Any


def identify(model: Any) -> Identity:
    """Return the manifest and variant of a model.

    Raises:
        NotCompileCapable: no manifest, or no variant of it, covers the model.
    """
    module = type(model).__module__
    manifest = find_manifest(module) or manifest_beside(own_file(model))
    if manifest is None:
        raise NotCompileCapable(
            "no manifest declares this model",
            where=module,
            allowed="a model of mlx-lm whose family has a manifest, or a model file with a manifest beside it",
            fix="mlx-audit draft MODEL.py --config config.json -o FAMILY.yaml, then mlx-audit run FAMILY.yaml",
        )
    arguments = model
    for name in manifest.arguments.split("."):
        try:
            arguments = getattr(arguments, name)
        except AttributeError as error:
            raise NotCompileCapable(
                "the model does not keep its arguments where the manifest says",
                where=f"{manifest.path.name}: arguments",
                found=error,
                fix=f"correct `arguments: {manifest.arguments}`",
            ) from error
    variant = manifest.variant_for(arguments)
    if variant is None:
        raise NotCompileCapable(
            "no variant of the manifest covers this configuration",
            where=manifest.family,
            allowed=", ".join(manifest.variants),
            fix=f"add a variant to {manifest.path.name}",
        )
    return Identity(manifest, variant, arguments)


def manifest_beside(file: Path | None) -> Manifest | None:
    """Return the manifest beside a model's own file that names it; other YAML files there are none of ours."""
    if file is None:
        return None
    names = re.compile(rf"^module:\s*['\"]?\./{re.escape(file.name)}['\"]?\s*(#.*)?$", re.MULTILINE)
    for path in sorted(file.parent.glob("*.yaml")):
        if names.search(_text(path)):
            return load_manifest(path)
    return None


def _text(path: Path) -> str:
    """Return the text of a file; nothing where it is none, as a folder or a pipe, is too large, or can't be read."""
    try:
        if path.is_file() and path.stat().st_size <= _MOST_BYTES:
            return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        pass
    return ""


def require_capable(model: Any, *, records: Path | None = None) -> Identity:
    """Return the identity of a model whose variant has a valid record for this backend.

    Raises:
        NotCompileCapable: the record is missing, damaged, stale, or proves something else.
    """
    warn_of_stale_stamp(model)
    identity = identify(model)
    manifest, variant, arguments = identity
    evidence = evidence_of(manifest, backend(), search_path(records))
    kind = rope_kind(arguments)
    fix = _fix(evidence, variant, kind)

    def refused(what: str, found: object = None) -> NotCompileCapable:
        where = f"{manifest.family}, variant {variant}, backend {evidence.backend}"
        return NotCompileCapable(what, where=where, found=found, fix=fix)

    decode = standing(evidence, variant)
    if decode.state != "holds" or decode.verdict not in ("capable", "limited"):
        raise refused(*_obstacle(decode))
    record = evidence.record
    assert record is not None, "a claim holds by a record"
    # A user's file is audited under another name than it is imported by, and so without what is registered for that.
    if adapter_digest(type(model).__module__) != record.digests.get("adapter"):
        raise NotCompileCapable(
            f"the record was made without the adapter that is registered for {type(model).__module__}",
            where=manifest.path.name,
            fix="register none for a model file: give its Model a method new_fixed_capacity_cache",
        )
    own = manifest.module.startswith("./")
    if foreign := foreign_code(model, own_file(model) if own else None):
        raise NotCompileCapable(
            "the model runs code that the record does not speak of",
            where=f"{manifest.family}, variant {variant}",
            found="; ".join(foreign[:3]),
            allowed="modules of mlx.nn and mlx-lm, as they are installed, or of the audited file",
            fix="audit the changed model as a file: mlx-audit run MODEL.py --config config.json",
        )
    for condition in record.variants[variant].conditions():
        if is_met(model, condition["needs"], condition["when"]):
            raise NotCompileCapable(
                "this configuration reaches code that the record does not speak of",
                where=condition["what"],
                found=f"a model for which {condition['when'] or 'the class is there'}",
                fix=f"mlx-audit run {evidence.target} --config config.json, with the model's own",
            )
    if unaudited := unaudited_layers(model, manifest, variant, arguments):
        raise NotCompileCapable(
            "this configuration has layers of a kind that the audited one has not",
            where=f"{manifest.path.name}: variants.{variant}.tiny",
            found="; ".join(unaudited[:3]),
            fix=f"give variant {variant} a tiny configuration with all of them, or add a variant; "
            f"then {evidence.command}",
        )
    if rope_standing(evidence, variant, kind, decode).state != "holds":
        raise refused("this RoPE kind was not proved", kind)
    return identity


def _fix(evidence: Evidence, variant: str, kind: str) -> str:
    """Return what to do about a refusal: the command that makes the record, or that there can be none."""
    manifest, run = evidence.manifest, evidence.command
    claim = manifest.variants[variant].claims.compiled_decode
    if claim in ("undecided", "not-capable"):
        claimed = f"{manifest.path.name} claims {claim} for variant {variant}"
        return f"decode eagerly: {claimed}, until {run} shows more"
    if kind not in (manifest.rope_kinds or ["default"]):
        return f"decode eagerly: {manifest.path.name} claims nothing for RoPE kind {kind}, until {run} shows more"
    if manifest.module.startswith(
        "./"
    ):  # its record lies beside its manifest, where no session looks by itself
        place = manifest.path.parent / "records"
        return f"{run}, then pass records=Path({str(place)!r}) or set MLX_AUDIT_RECORDS={place}"
    return run


def _obstacle(found: Standing) -> tuple[str, object]:
    """Return why a claim lets no session in, in one clause, and the details."""
    match found.state:
        case "damaged":
            return "the record cannot be used", found.reason
        case "missing" if found.covered:
            return "the record does not cover this variant", ", ".join(found.covered)
        case "missing":
            return "compiled decoding was not proved here: there is no record", None
        case "stale":
            return "the record is stale", found.reason
        case "undecided":
            return "compiled decoding was not proved here: nothing is claimed of this variant", None
    return f"the variant is {found.verdict}", found.reason
