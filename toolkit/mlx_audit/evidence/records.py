"""Records: made, written, looked for and read; what a damaged one says is not believed."""

from __future__ import annotations

import os
import shlex
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from pydantic import ValidationError

from mlx_audit import resources
from mlx_audit.errors import MlxAuditError
from mlx_audit.evidence.atomic import write_atomically
from mlx_audit.evidence.codes import RESTORE
from mlx_audit.evidence.digests import ordered, ordered_toolkit, prefix_files, total
from mlx_audit.evidence.lapse import (
    PREFIX,
    Staleness,
    current_code,
    current_digests,
    lapse,
    minor,
    staleness,
)
from mlx_audit.evidence.record_schema import (
    SCHEMA,
    Record,
    RecordedClaim,
    RecordedResult,
    RecordedVariant,
    combine,
    self_digest,
)
from mlx_audit.evidence.registered import adapter_total
from mlx_audit.evidence.results import Result
from mlx_audit.evidence.sound import unsound
from mlx_audit.manifests import Manifest
from mlx_audit.manifests.files import read_json, real

__all__ = [
    "SCHEMA",
    "Record",
    "RecordError",
    "RecordedResult",
    "RecordedVariant",
    "Staleness",
    "combine",
    "current_digests",
    "find_record",
    "lapse",
    "load_record",
    "make_record",
    "minor",
    "record_path",
    "require_writable",
    "search_path",
    "staleness",
    "write_atomically",
    "write_record",
]

_MOST_BYTES = 16 << 20
_MOST_VALUES = 100_000


class RecordError(MlxAuditError):
    """A record file is damaged or of another format version."""


def make_record(manifest: Manifest, results: Sequence[Result], backend: str, mlx_version: str) -> Record:
    """Return the record of one run over a family's variants."""
    variants: dict[str, RecordedVariant] = {}
    for result in results:
        checks = [check.model_copy(update={"where": None, "reproduce": None}) for check in result.checks]
        variant = variants.setdefault(result.variant, _variant(manifest, result))
        variant.results.append(RecordedResult(configuration=result.configuration, checks=checks))
    code = current_code(manifest)
    digests, files = dict(code.digests), dict(code.files)
    for variant in variants.values():
        if not variant.speaks_of(RESTORE):
            variant.restore = None
        else:
            files[PREFIX] = prefix_files()
            digests[PREFIX] = total(files[PREFIX])
    return Record(
        family=manifest.family,
        module=manifest.module,
        backend=backend,
        mlx=minor(mlx_version),
        adapter=code.adapter,
        variants=variants,
        digests=digests,
        files=files,
    )


def _variant(manifest: Manifest, result: Result) -> RecordedVariant:
    declared = manifest.variants.get(result.variant)
    return RecordedVariant(
        claimed=None if declared is None else declared.claims.compiled_decode,
        profile=result.profile,
        seed=result.seed,
        limits=result.limits,
        restore=RecordedClaim(claimed=None if declared is None else declared.claims.prefix_restore),
        results=[],
    )


def record_path(folder: Path, family: str, backend: str) -> Path:
    """Return where the record of a family and backend lies below `folder`."""
    return folder / family / f"{backend}.json"


def search_path(records: Path | None = None, *, working_directory: bool = False) -> list[Path]:
    """Return the folders to look in, first to last.

    Args:
        records: A folder that the caller named.
        working_directory: Also look in `./model_audits/records`; only the command line does.
    """
    folders = [records] if records is not None else []
    if named := os.environ.get("MLX_AUDIT_RECORDS"):
        folders.append(Path(named))
    if working_directory and (here := Path("model_audits")).is_dir():
        folders.append(here / "records")
    return [*folders, resources.model_audits() / "records"]


def find_record(family: str, backend: str, folders: Sequence[Path]) -> Record | None:
    """Return the first record found, or None.

    Raises:
        RecordError: the file is damaged.
    """
    for folder in folders:
        path = record_path(folder, family, backend)
        if _is_there(path):
            record = load_record(path)
            if (record.family, record.backend) != (family, backend):
                raise RecordError(
                    "the record belongs to another family or backend",
                    where=str(path),
                    found=f"{record.family}, {record.backend}",
                    allowed=f"{family}, {backend}",
                    fix=f"mlx-audit run {family} --record",
                )
            return record
    return None


def load_record(path: Path) -> Record:
    """Read a record and check its form and self-digest.

    Raises:
        RecordError: damaged, oversized, or of another format version.
    """

    def invalid(what: str, found: object = None, allowed: object = None) -> RecordError:
        return RecordError(
            what,
            where=str(path),
            found=found,
            allowed=allowed,
            fix=f"mlx-audit run {path.parent.name} --record",
        )

    try:
        if path.stat().st_size > _MOST_BYTES:
            raise invalid("the record is too large", path.stat().st_size, f"{_MOST_BYTES} bytes")
        data = read_json(path, _MOST_BYTES, _MOST_VALUES)
    except (OSError, ValueError, RecursionError) as error:
        raise invalid("the record cannot be read", error) from error
    if not isinstance(data, dict) or data.get("schema") != SCHEMA:
        raise invalid(
            "another format version", data.get("schema") if isinstance(data, dict) else None, SCHEMA
        )
    stored = data.pop("digest", None)
    if stored != self_digest(data):
        raise invalid("the record was changed after it was written (self-digest)", stored)
    try:
        record = Record.model_validate({**data, "digest": stored})
    except ValidationError as error:
        raise invalid("the record does not have the form of its schema", error.errors()[0]["msg"]) from error
    if contradiction := next(_contradictions(record), None):
        raise invalid(*contradiction)
    return record


def _contradictions(record: Record) -> Iterator[tuple[str, object, object]]:
    """Yield what a record states beside what follows from the rest of it."""
    for name, variant in record.variants.items():
        verdict = variant.own_verdict()
        if (variant.stated, variant.reason) != verdict:
            stated = f"{variant.stated}: {variant.reason}"
            yield (
                f"the verdict of variant {name} does not follow from its checks",
                stated,
                ": ".join(verdict),
            )
        yield from _contradiction_of_restore(name, variant)
        for result in variant.results:
            codes = Counter(check.code for check in result.checks)
            if twice := {code for code, count in codes.items() if count > 1}:
                yield f"{name} {result.configuration} has a check twice", ", ".join(sorted(twice)), "once"
    totals = {
        "model": lambda files: total(ordered(record.module, files)),
        "toolkit": lambda files: total(ordered_toolkit(files)),
        "adapter": lambda files: adapter_total(record.adapter, files),
        PREFIX: lambda files: total(dict(sorted(files.items()))),
    }
    for name, digest in record.digests.items():
        if name in totals and (found := totals[name](record.files.get(name, {}))) != digest:
            yield f"the digest `{name}` does not follow from its files", digest, found
    yield from unsound(record)


def _contradiction_of_restore(name: str, variant: RecordedVariant) -> Iterator[tuple[str, object, object]]:
    """Yield what a variant states of restored prefixes beside what follows from its checks."""
    stated = None if variant.restore is None else (variant.restore.stated, variant.restore.reason)
    follows = tuple(variant.own_verdict(RESTORE)) if variant.speaks_of(RESTORE) else None
    if stated != follows:
        what = f"what variant {name} states of restored prefixes does not follow from its checks"
        yield what, stated and ": ".join(stated), follows and ": ".join(follows)


def write_record(record: Record, folder: Path) -> Path:
    """Write a record below `folder`, atomically, and return its path.

    Raises:
        RecordError: it cannot be written there, or a link leads it out of the folder: to a file of the user's that
            whoever made the folder chose.
    """
    path = record_path(folder, record.family, record.backend)
    if not real(path).is_relative_to(real(folder)):
        raise RecordError(
            "a link leads the record out of its folder",
            where=str(path),
            found=real(path),
            allowed=f"a file below {folder}",
            fix=f"rm {shlex.quote(str(path))}, or set MLX_AUDIT_RECORDS to the folder that is meant",
        )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, record.to_json())
    except OSError as error:
        raise RecordError("the record cannot be written", where=str(path), found=error.strerror) from error
    return path


def require_writable(folder: Path, family: str = "") -> None:
    """Refuse a folder below which no record of a family could be written; nothing is made.

    Raises:
        RecordError: it is no folder, nor can it be made one.
    """
    place = (folder / family).absolute()
    try:
        there = next(parent for parent in (place, *place.parents) if parent.exists())
    except (OSError, ValueError) as error:
        raise RecordError("no usable folder of records", where=str(folder), found=error) from error
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        raise RecordError(
            "records cannot be written here", where=str(folder), found=f"{there} is no writable folder"
        )


def _is_there(path: Path) -> bool:
    """Whether anything has the name of a record; a dangling link or a pipe is a damaged one, and hides no other."""
    try:
        return path.is_symlink() or path.exists()
    except OSError as error:
        raise RecordError("the record cannot be read", where=str(path), found=error.strerror) from error
