"""What the records of all families say, as documents to report."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from importlib.metadata import version
from pathlib import Path

from mlx_audit.evidence.recorded import record_results, recorded_environment
from mlx_audit.evidence.records import find_record, minor, record_path, search_path, staleness
from mlx_audit.evidence.results import ClaimResult, Result, Results
from mlx_audit.manifests import Manifest, load_manifests

NO_RECORD = "no record"
"""How the reason begins where a variant has no record."""


def recorded_documents() -> tuple[list[Results], list[Path]]:
    """Return a document for each family and backend, and the files that records are read from.

    Records are looked for where the command line looks. One that no longer counts says so, and proves nothing. A
    variant without a record, on a backend that others have records of, is undecided.

    Raises:
        MlxAuditError: a manifest or a record is damaged.
    """
    folders = search_path(working_directory=True)
    manifests = load_manifests()
    backends = sorted({name for manifest in manifests for name in _backends(manifest.family, folders)})
    documents, files = [], []
    for manifest in manifests:
        for backend in backends:
            documents.append(_document(manifest, backend, folders))
            files += [record_path(folder, manifest.family, backend) for folder in folders]
    return documents, files


def _document(manifest: Manifest, backend: str, folders: Sequence[Path]) -> Results:
    record = find_record(manifest.family, backend, folders)
    if record is None:
        return Results(
            environment=recorded_environment(backend, minor(version("mlx"))),
            results=[_missing(manifest, name, backend) for name in manifest.variants],
        )
    reasons = staleness(record, manifest, mlx_version=version("mlx"))
    document = record_results(record, manifest, reasons)
    document.results += [
        _missing(manifest, name, backend) for name in manifest.variants if name not in record.variants
    ]
    return document


def _missing(manifest: Manifest, variant: str, backend: str) -> Result:
    reason = f"{NO_RECORD} of this variant on {backend}"
    declared = manifest.variants[variant].claims.model_dump(exclude_none=True)
    claims = {
        name: ClaimResult(claimed=claimed, verdict="undecided", reason=reason)
        for name, claimed in declared.items()
    }
    return Result(
        target=manifest.family,
        family=manifest.family,
        variant=variant,
        configuration="tiny",
        verdict="undecided",
        reason=reason,
        claims=claims,
    )


def _backends(family: str, folders: Iterable[Path]) -> list[str]:
    return sorted({file.stem for folder in folders for file in (folder / family).glob("*.json")})
