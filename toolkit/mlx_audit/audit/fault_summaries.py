"""`faults --record`: what became of planted faults, kept in the record of the family."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import version

from mlx_audit.audit.kill_matrix import KillMatrix, Planted
from mlx_audit.audit.recording import NotRecorded, record_folder
from mlx_audit.audit.request import Options, Request
from mlx_audit.evidence.digests import faults_digest
from mlx_audit.evidence.environment import backend
from mlx_audit.evidence.records import Record, find_record, require_writable, staleness, write_record
from mlx_audit.evidence.results import KillSummary
from mlx_audit.manifests import load_manifest
from mlx_audit.models.target import Target


def require_record(target: Target) -> None:
    """Refuse a target without a valid record on this backend, or with one that could not be written.

    Raises:
        NotRecorded: says why.
        RecordError: the record is damaged, or cannot be written again.
    """
    request = Request.of(target, Options())
    require_writable(record_folder(request), _record_of(request).family)


def record_summaries(matrix: KillMatrix, request: Request, profile: str) -> str:
    """Write what became of the faults that were planted in a family into its record, and say so in one line.

    A variant in which nothing was planted, or in which the healthy model does not pass, keeps none.
    """
    record = _record_of(request)
    kept = []
    for name, variant in record.variants.items():
        column = f"{request.family} {name}"
        planted = [one for one in matrix.planted if one.stack == column]
        variant.faults = None
        if planted and column not in matrix.unhealthy and not matrix.failed:
            variant.faults = summary(planted, profile)
            kept.append(name)
    path = write_record(record, record_folder(request))
    return f"recorded: {path}: faults in {', '.join(kept) or 'no variant'}"


def summary(planted: Sequence[Planted], profile: str) -> KillSummary:
    """Return what became of the faults in one variant."""
    killed: dict[str, list[str]] = {}
    for one in planted:
        if one.fate == "killed":
            killed.setdefault(one.fault.by, []).append(one.fault.name)
    return KillSummary(
        profile=profile,
        killed={code: sorted(names) for code, names in sorted(killed.items())},
        survived=sorted(one.fault.name for one in planted if one.fate == "survived"),
        unshown=sorted(one.fault.name for one in planted if one.fate in ("no place", "blind")),
        digest=faults_digest(),
    )


def _record_of(request: Request) -> Record:
    fix = f"mlx-audit run {request.text} --record"
    if request.manifest is None:
        raise NotRecorded("no manifest declares the target, so it has no record", where=request.text)
    manifest, folder = load_manifest(request.manifest), record_folder(request)
    record = find_record(manifest.family, backend(), [folder])
    if record is None:
        raise NotRecorded("there is no record that could hold these faults", where=str(folder), fix=fix)
    if reasons := staleness(record, manifest, mlx_version=version("mlx")):
        what = "the record that could hold these faults is stale"
        raise NotRecorded(what, where=manifest.family, found="; ".join(reasons), fix=fix)
    return record
