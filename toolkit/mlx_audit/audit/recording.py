"""`run --record`: from the outcome of a full run to the stored evidence."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mlx_audit import resources
from mlx_audit.audit.exit_codes import HOLDS, code_of
from mlx_audit.audit.planted import PLANT, planted_name
from mlx_audit.audit.request import Request
from mlx_audit.audit.runner import Outcome
from mlx_audit.errors import MlxAuditError
from mlx_audit.evidence.atomic import clear_leftovers
from mlx_audit.evidence.lapse import PREFIX
from mlx_audit.evidence.own_imports import foreign_imports
from mlx_audit.evidence.records import (
    Record,
    RecordError,
    load_record,
    make_record,
    record_path,
    write_record,
)
from mlx_audit.evidence.results import CheckResult, Result
from mlx_audit.manifests import load_manifest

MEASURED = ("_seconds", "_measured")
"""Ends of the names of figures that differ from run to run; records leave them out."""

_FOLDERS = re.compile(r"(?<![\w.)/~-])(?:~(?:/[^\s/:'\"`]+)*|(?:/[^\s/:'\"`]+)+)/(?=[^\s/])")
"""The folders of an absolute path."""


class NotRecorded(MlxAuditError):
    """No record may be made of this run."""


def require_recordable(request: Request) -> None:
    """Refuse, before any work, what could only give evidence of a part.

    Raises:
        NotRecorded: says why.
    """
    _require_nothing_planted()
    options = request.options
    reasons = (
        (options.partial, "only some tiers or checks are selected"),
        (request.config is not None, "a single configuration does not prove its variant"),
        (request.manifest is None, "no manifest declares the target"),
        (options.dtype != "float32", "records are made in float32"),
    )
    for refused, reason in reasons:
        if refused:
            raise NotRecorded(
                f"no record can be made: {reason}",
                where=request.text,
                fix="mlx-audit run FAMILY --record, without --tier, --only, --config and --dtype; "
                "a file needs a manifest: mlx-audit draft",
            )
    _require_covered(request)


def _require_covered(request: Request) -> None:
    """Refuse a model file that runs code of which a record would hold no digest."""
    if request.manifest is None:
        return
    manifest = load_manifest(request.manifest)
    if not manifest.module.startswith("./"):
        return
    file = manifest.path.parent / manifest.module
    if foreign := foreign_imports(file):
        raise NotRecorded(
            "no record can be made: no digest covers what the model file imports",
            where=str(file),
            found="; ".join(foreign),
            allowed="imports of mlx, mlx-lm, NumPy and the standard library",
            fix="move that code into the model's file",
        )


def _require_nothing_planted() -> None:
    if fault := planted_name():
        raise NotRecorded(
            "no record can be made: a fault is planted", where=PLANT, found=fault, fix=f"unset {PLANT}"
        )


def record_folder(request: Request) -> Path:
    """Return where a target's record is written: $MLX_AUDIT_RECORDS; `records/` beside a manifest of the user's own;
    else ./model_audits/records, else where the shipped ones are."""
    if named := os.environ.get("MLX_AUDIT_RECORDS"):
        return Path(named)
    if request.manifest is not None and request.manifest.parent != resources.model_audits().resolve():
        return request.manifest.parent / "records"
    here = Path("model_audits")
    return (here if here.is_dir() else resources.model_audits()) / "records"


def record(outcome: Outcome, folder: Path) -> Path:
    """Write the record of a family and return its path; results of undecided claims stay out.

    Raises:
        NotRecorded: a claim does not hold, so that there is nothing to prove; an older record stays as it is.
    """
    _require_nothing_planted()
    clear_leftovers(folder / outcome.request.family)
    claimed = [result for result in outcome.results if is_claimed(result)]
    for result in claimed:
        if code_of(result) != HOLDS or not result.checks:
            raise NotRecorded(
                f"no record was made: a claim does not hold: {result.reason}",
                where=f"{result.family} {result.variant} {result.configuration}",
            )
    if not claimed or outcome.environment is None or outcome.request.manifest is None:
        raise NotRecorded(
            "no record was made: there is no claim to confirm",
            where=outcome.request.family,
            fix="set `claims:` in the manifest",
        )
    manifest = load_manifest(outcome.request.manifest)
    environment = outcome.environment
    stable_results = [_stable(result) for result in claimed]
    made = make_record(manifest, stable_results, environment.backend, environment.mlx)
    # The child that audited may have been started with other paths.
    if any(result.digests.get("adapter") != made.digests.get("adapter") for result in claimed):
        raise NotRecorded(
            "no record was made: another adapter was audited than the one that serves the family here",
            where=manifest.family,
        )
    _kept_faults(made, folder)
    return write_record(made, folder)


def _stable(result: Result) -> Result:
    return result.model_copy(update={"checks": [stable(check) for check in result.checks]})


def is_claimed(result: Result) -> bool:
    """Return whether a result is recorded: something is claimed of it, capable or not."""
    return any(claim.claimed not in (None, "undecided") for claim in result.claims.values())


def stable(check: CheckResult) -> CheckResult:
    """Return a check's result as it is recorded: the same wherever and whenever it is made on one kind of machine."""
    figures, reason = _unmeasured(check.figures), _without_folders(check.reason)
    return check.model_copy(update={"figures": figures, "reason": reason})


def _unmeasured(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _unmeasured(item) for key, item in value.items() if not key.endswith(MEASURED)}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_unmeasured(item) for item in value]
    return _without_folders(value) if isinstance(value, str) else value


def _without_folders(text: str) -> str:
    """Return a text whose absolute paths are names of files: folders are those of one machine."""
    return _FOLDERS.sub("", text)


def _kept_faults(made: Record, folder: Path) -> None:
    """Take over what the old record says of planted faults, where it is of the same code and manifest."""
    path = record_path(folder, made.family, made.backend)
    try:
        old = load_record(path)
    except RecordError:
        return  # none is there, or none that counts: it is replaced
    if _of_decoding(old) == _of_decoding(made) and old.mlx == made.mlx:
        for name, variant in made.variants.items():
            variant.faults = old.variants[name].faults if name in old.variants else None


def _of_decoding(record: Record) -> dict[str, str]:
    """Return the digests that compiled decoding rests on."""
    return {name: digest for name, digest in record.digests.items() if name != PREFIX}
