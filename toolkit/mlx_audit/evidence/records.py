"""Records: what was proved, where it is looked for, and when it lapses."""

from __future__ import annotations

import hashlib
import json
import os
import stat
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from mlx_audit import resources
from mlx_audit.errors import MlxAuditError, NotCompileCapable
from mlx_audit.evidence.codes import needed_codes
from mlx_audit.evidence.digests import file_digest, manifest_digest, model_digest, toolkit_digest
from mlx_audit.evidence.environment import backend
from mlx_audit.evidence.registered import adapter_digest
from mlx_audit.evidence.results import CheckResult, Result, VerdictName
from mlx_audit.evidence.verdict import Verdict, decide
from mlx_audit.manifests import Manifest
from mlx_audit.models.rope import tiny_name

SCHEMA = "mlx-audit/record/1"
_MOST_BYTES = 16 << 20


class RecordError(MlxAuditError):
    """A record file is damaged or of another format version."""


class RecordedResult(BaseModel):
    """One configuration's checks, without times and paths."""

    model_config = ConfigDict(extra="forbid")

    configuration: str
    checks: list[CheckResult]


class RecordedVariant(BaseModel):
    """All configurations of one variant."""

    model_config = ConfigDict(extra="forbid")

    profile: str
    seed: int
    limits: list[str] = Field(default_factory=list)
    results: list[RecordedResult]

    def verdict(self) -> Verdict:
        """Recompute the verdict from the checks; nothing stored is believed.

        A result that lacks a check which exists today proves less than is asked today: it is undecided.
        """
        return combine(self._verdict(result) for result in self.results)

    def conditions(self) -> list[dict[str, Any]]:
        """Return what reading the source found that no audited configuration reaches: `what`, `needs` and `when`.

        The record does not speak of a model that reaches one of them.
        """
        found = {
            str(item): item
            for result in self.results
            for check in result.checks
            for item in check.figures.get("conditional", ())
            if isinstance(item, dict) and item.keys() == {"what", "needs", "when"}
        }
        return list(found.values())

    def proves_rope(self, kind: str, main: str) -> bool:
        """Return whether a RoPE kind was audited; `main` is the one of the variant's main configuration."""
        return any(result.configuration == tiny_name(kind, main) for result in self.results)

    def _verdict(self, result: RecordedResult) -> Verdict:
        verdict = decide(result.checks, limits=self.limits)
        missing = sorted(needed_codes() - {check.code for check in result.checks})
        if missing and verdict.name in ("capable", "limited"):
            return Verdict("undecided", f"{result.configuration}: the record lacks {', '.join(missing)}")
        return verdict


class Record(BaseModel):
    """The evidence for one family on one backend."""

    model_config = ConfigDict(extra="forbid", populate_by_name=True)

    schema_: str = Field(default=SCHEMA, alias="schema")
    family: str
    module: str
    backend: str
    mlx: str
    """Minor version, such as `0.32`."""
    digests: dict[str, str]
    variants: dict[str, RecordedVariant]
    digest: str = ""
    """Over all the rest: it catches accidents, not forgery."""

    def to_json(self) -> str:
        """Return the canonical text: sorted keys, and the self-digest filled in."""
        body = self.model_dump(by_alias=True, exclude={"digest"})
        body["digest"] = _self_digest(body)
        return json.dumps(body, indent=1, sort_keys=True, ensure_ascii=False) + "\n"


def combine(verdicts: Iterable[Verdict]) -> Verdict:
    """Return the verdict of a variant from those of its configurations: the weakest one decides."""
    order: tuple[VerdictName, ...] = ("not-capable", "undecided", "limited", "capable")
    return min(
        verdicts, key=lambda verdict: order.index(verdict.name), default=Verdict("undecided", "no result")
    )


def make_record(manifest: Manifest, results: Sequence[Result], backend: str, mlx_version: str) -> Record:
    """Return the record of one run over a family's variants."""
    variants: dict[str, RecordedVariant] = {}
    for result in results:
        checks = [check.model_copy(update={"where": None, "reproduce": None}) for check in result.checks]
        variant = variants.setdefault(
            result.variant,
            RecordedVariant(profile=result.profile, seed=result.seed, limits=result.limits, results=[]),
        )
        variant.results.append(RecordedResult(configuration=result.configuration, checks=checks))
    return Record(
        family=manifest.family,
        module=manifest.module,
        backend=backend,
        mlx=minor(mlx_version),
        digests=current_digests(manifest),
        variants=variants,
    )


def current_digests(manifest: Manifest) -> dict[str, str]:
    """Return the digests that a record of a family must have to be valid here and now.

    `adapter` is among them only where a registered adapter takes the generic one's place.

    Raises:
        NotCompileCapable: it is not clear which adapter serves the family, or its source cannot be read.
    """
    if manifest.module.endswith(".py"):
        model = file_digest(manifest.path.parent / manifest.module)
    else:
        model = model_digest(manifest.module)
    digests = {"model": model, "toolkit": toolkit_digest(), "manifest": manifest_digest(manifest)}
    adapter = adapter_digest(manifest.module)
    return digests if adapter is None else {**digests, "adapter": adapter}


def minor(version: str) -> str:
    """Return `0.32` for `0.32.4`."""
    return ".".join(version.split(".")[:2])


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
        if _is_file(path):
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
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise invalid("the record cannot be read", error) from error
    if not isinstance(data, dict) or data.get("schema") != SCHEMA:
        raise invalid(
            "another format version", data.get("schema") if isinstance(data, dict) else None, SCHEMA
        )
    stored = data.pop("digest", None)
    if stored != _self_digest(data):
        raise invalid("the record was changed after it was written (self-digest)", stored)
    try:
        return Record.model_validate({**data, "digest": stored})
    except ValidationError as error:
        raise invalid("the record does not have the form of its schema", error.errors()[0]["msg"]) from error


def staleness(record: Record, manifest: Manifest, *, mlx_version: str) -> list[str]:
    """Return why a record no longer counts, each reason naming what changed; empty when it is valid."""
    reasons = []
    if record.mlx != minor(mlx_version):
        reasons.append(f"recorded with mlx {record.mlx}, installed is {minor(mlx_version)}")
    names = {
        "model": f"the source of {manifest.module}",
        "toolkit": "mlx-audit's caches, adapters or decode",
        "manifest": f"what {manifest.path.name} states",
        "adapter": f"the adapter of {manifest.module}",
    }
    try:
        digests = current_digests(manifest)
    except NotCompileCapable as error:
        return [*reasons, str(error)]
    except (OSError, SyntaxError) as error:
        return [*reasons, f"{names['model']} cannot be read: {error}"]
    for name in dict.fromkeys([*digests, *record.digests]):
        if record.digests.get(name) != digests.get(name):
            reasons.append(f"{names.get(name, name)} changed since")
    return reasons


def record_state(manifest: Manifest, variant: str) -> str:
    """Return the state of a variant's record on this backend, for people: its verdict, or why there is none.

    Reads the working directory too, as the command line does.
    """
    try:
        record = find_record(manifest.family, backend(), search_path(working_directory=True))
    except RecordError as error:
        return f"damaged ({error.what})"
    if record is None or variant not in record.variants:
        return "none"
    if reasons := staleness(record, manifest, mlx_version=version("mlx")):
        return f"stale ({'; '.join(reasons)})"
    return record.variants[variant].verdict().name


def write_record(record: Record, folder: Path) -> Path:
    """Write a record below `folder`, atomically, and return its path.

    Raises:
        RecordError: it cannot be written there.
    """
    path = record_path(folder, record.family, record.backend)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, record.to_json())
    except OSError as error:
        raise RecordError("the record cannot be written", where=str(path), found=error.strerror) from error
    return path


def require_writable(folder: Path) -> None:
    """Refuse a folder below which no record could be written; nothing is made.

    Raises:
        RecordError: it is no folder, nor can it be made one.
    """
    try:
        there = next(place for place in (folder.absolute(), *folder.absolute().parents) if place.exists())
    except (OSError, ValueError) as error:
        raise RecordError("no usable folder of records", where=str(folder), found=error) from error
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        raise RecordError(
            "records cannot be written here", where=str(folder), found=f"{there} is no writable folder"
        )


def write_atomically(path: Path, text: str) -> None:
    """Write a text file so that a reader, or a killed run, sees the old file or the new one.

    A link stays a link. What is no file, such as a pipe or a device, is written to, never replaced.
    """
    mode = _mode(path)
    if mode is not None and not stat.S_ISREG(mode):
        with path.open("w", encoding="utf-8") as file:
            file.write(text)
        return
    path = path.resolve()
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=".mlx-audit-")
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        Path(name).chmod(0o644)
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def _mode(path: Path) -> int | None:
    """What kind of thing a path leads to; None when there is nothing."""
    try:
        return path.stat().st_mode
    except FileNotFoundError:
        return None


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError as error:
        raise RecordError("the record cannot be read", where=str(path), found=error.strerror) from error


def _self_digest(body: Mapping[str, Any]) -> str:
    text = json.dumps({k: v for k, v in body.items() if k != "digest"}, sort_keys=True, ensure_ascii=False)
    # Half a surrogate pair, which JSON can spell, has no UTF-8 of its own.
    return f"sha256:{hashlib.sha256(text.encode(errors='surrogatepass')).hexdigest()}"
