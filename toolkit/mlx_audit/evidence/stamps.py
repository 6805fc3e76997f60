"""Stamps: what an audit of a checkpoint found, kept beside its weights, and when it no longer matches them.

A stamp informs. It never makes anything capable: that is decided by records alone.
"""

from __future__ import annotations

import hashlib
import json
import re
import shlex
import warnings
from collections.abc import Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from mlx_audit import resources
from mlx_audit.errors import MlxAuditError, NotCompileCapable
from mlx_audit.evidence.asked import decide_today
from mlx_audit.evidence.atomic import write_atomically
from mlx_audit.evidence.codes import DECODE, RESTORE
from mlx_audit.evidence.digests import model_digest, prefix_digest, toolkit_digest
from mlx_audit.evidence.file_hashes import Listener, hash_files, state_of
from mlx_audit.evidence.lapse import PREFIX
from mlx_audit.evidence.records import current_digests, minor
from mlx_audit.evidence.results import CheckResult, ClaimResult, Items, Status, Tier, VerdictName
from mlx_audit.manifests import Manifest, ManifestError, find_manifest, load_manifest
from mlx_audit.manifests.files import read_json
from mlx_audit.models.origins import folder_of

SCHEMA = "mlx-audit/stamp/1"
FILE = "mlx_audit.json"
WEIGHTS = "model*.safetensors"
"""Names of the files that mlx-lm takes for weights."""

OTHERS = frozenset(
    (
        *("config.json", "generation_config.json", "hf_quant_config.json", "model.safetensors.index.json"),
        *("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json"),
        *("added_tokens.json", "vocab.json", "vocab.txt", "merges.txt", "spiece.model", "tiktoken.model"),
        *("sentencepiece.bpe.model", "chat_template.jinja", "chat_template.json"),
    )
)
"""Names of the other files that decide what a model says: configuration, tokenizer, chat template."""

_MOST_BYTES = 4 << 20
_MOST_VALUES = 500_000
_MOST_FILES = 10_000


class StampError(MlxAuditError):
    """A stamp is damaged, too large, of another format version, or cannot be written."""


class StaleStamp(UserWarning):
    """A model's folder bears a stamp that no longer matches it, or what is installed."""


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", populate_by_name=True)


class StampedFile(_Model):
    """What was in a file when it was audited."""

    bytes: int = Field(ge=0)
    sha256: str = Field(pattern="^[0-9a-f]{64}$")


class StampedCheck(_Model):
    """What one check found; without figures, places and paths."""

    code: str = Field(pattern="^[A-Z]{3}[0-9]{3}$")
    tier: Tier
    status: Status
    reason: str = ""


class Stamp(_Model):
    """What an audit of a checkpoint, with its own weights, found."""

    schema_: Literal["mlx-audit/stamp/1"] = Field(default="mlx-audit/stamp/1", alias="schema")
    family: str = Field(pattern="^[A-Za-z0-9_-]{1,64}$")
    module: str = Field(pattern=r"^mlx_lm\.models\.[A-Za-z0-9_-]{1,64}$")
    variant: str
    verdict: VerdictName
    reason: str = ""
    limits: list[str] = Field(default_factory=list)
    claims: dict[str, ClaimResult] = Field(default_factory=dict)
    backend: str
    mlx: str
    """Minor version, such as `0.32`."""
    profile: str
    seed: int
    digests: dict[str, str]
    """Of the model's source, of mlx-audit's own code, and of the manifest where there is one."""
    checks: Items[StampedCheck]
    files: dict[str, StampedFile] = Field(max_length=_MOST_FILES)
    check_again: str
    """Shell command, to be run in the folder."""
    digest: str = ""
    """Over all the rest: it catches accidents, not forgery."""

    def to_json(self) -> str:
        """Return the canonical text: sorted keys, and the self-digest filled in."""
        body = self.model_dump(by_alias=True, exclude={"digest"})
        body["digest"] = _self_digest(body)
        return json.dumps(body, indent=1, sort_keys=True, ensure_ascii=False) + "\n"


def model_files(folder: Path) -> list[str]:
    """Return the names of the files in a folder that decide what its model says, sorted."""
    names = (path.name for path in folder.iterdir())
    return sorted(name for name in names if name in OTHERS or fnmatchcase(name, WEIGHTS))


def write_stamp(stamp: Stamp, folder: Path) -> Path:
    """Write a stamp into a folder, atomically, and return its path.

    Raises:
        StampError: it cannot be written there.
    """
    path = folder / FILE
    try:
        write_atomically(path, stamp.to_json())
    except OSError as error:
        raise StampError("the stamp cannot be written", where=str(path), found=error.strerror) from error
    return path


def load_stamp(folder: Path) -> Stamp | None:
    """Read a folder's stamp and check its form; None where there is none.

    Raises:
        StampError: damaged, oversized, or of another format version.
    """
    path = folder / FILE

    def invalid(what: str, found: object = None, allowed: object = None) -> StampError:
        return StampError(what, where=str(path), found=found, allowed=allowed, fix=renewal(folder))

    try:
        if not path.is_symlink() and not path.exists():
            return None
        if (size := state_of(path)[2]) > _MOST_BYTES:
            raise invalid("the stamp is too large", size, f"{_MOST_BYTES} bytes")
        data = read_json(path, _MOST_BYTES, _MOST_VALUES)
    except (OSError, ValueError, RecursionError) as error:
        raise invalid("the stamp cannot be read", error) from error
    if not isinstance(data, dict) or data.get("schema") != SCHEMA:
        found = data.get("schema") if isinstance(data, dict) else type(data).__name__
        raise invalid("the stamp is of another format version", found, SCHEMA)
    stored = data.pop("digest", None)
    if stored != _self_digest(data):
        raise invalid("the stamp was changed after it was written (self-digest)", stored)
    try:
        stamp = Stamp.model_validate({**data, "digest": stored})
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise invalid("the stamp does not have the form of its schema", f"{place}: {first['msg']}") from error
    if outside := [name for name in stamp.files if not is_plain_name(name)]:
        raise invalid("the stamp names a file outside its folder", outside[0])
    return stamp


def is_plain_name(name: str) -> bool:
    """Return whether a name is that of a file in a folder, and no path that leads anywhere else."""
    return name not in ("", ".", "..") and not re.search(r"[/\\\x00-\x1f]", name) and len(name) <= 255


def check_stamp(folder: Path, listener: Listener | None = None) -> list[str]:
    """Return why a folder's stamp no longer counts; empty when it matches, or when there is none.

    All bytes of the stamped files are read, once a process while they stay as they are.

    Args:
        folder: A checkpoint folder.
        listener: Told how many more bytes have been read.
    """
    try:
        stamp = load_stamp(folder)
    except StampError as error:
        return [error.what if error.found is None else f"{error.what}: {error.found}"]
    return (
        [] if stamp is None else [*_of_code(stamp), *_of_verdict(stamp), *_of_files(stamp, folder, listener)]
    )


def renewal(folder: Path) -> str:
    """Return the command that audits a folder again and stamps it anew."""
    name = shlex.quote(str(folder))
    return f"mlx-audit convert {name} {name}"


def stale_text(folder: Path, reasons: list[str], *, shown: str | None = None) -> str:
    """Return the line that says that a stamp is stale, and what to do."""
    fix = renewal(folder if shown is None else Path(shown))
    return f"stamp: stale: {'; '.join(reasons)}; fix: {fix}"


_told: set[tuple[Any, ...]] = set()


def warn_of_stale_stamp(model: Any) -> None:
    """Warn, once for a state of the folder, that a model was loaded from one whose stamp is stale.

    Only models loaded by mlx-audit are known by their folder (`mlx_audit.load`).
    """
    folder = folder_of(model)
    if folder is None or not (reasons := check_stamp(folder)):
        return
    state = (folder, *reasons, *(_state(folder / name) for name in [FILE, *_names(folder)]))
    if state not in _told:
        _told.add(state)
        warnings.warn(StaleStamp(f"{folder}: {stale_text(folder, reasons)}"), stacklevel=4)


def _state(path: Path) -> tuple[int, ...]:
    try:
        return state_of(path)
    except OSError:
        return ()


def _names(folder: Path) -> list[str]:
    try:
        return model_files(folder)
    except OSError:
        return []


def stamp_digests(family: str, module: str, claims: Iterable[str] = ()) -> dict[str, str]:
    """Return the digests that a stamp of a model must have to be valid here and now.

    Args:
        family: Its family.
        module: Its module.
        claims: Of what it speaks.

    Raises:
        ManifestError: the family's manifest is broken.
        NotCompileCapable: see `current_digests`.
        OSError, SyntaxError: the model's source cannot be read.
    """
    more = {PREFIX: prefix_digest()} if RESTORE in claims else {}
    manifest = _manifest(family, module)
    if manifest is not None:
        return current_digests(manifest) | more
    return {"model": model_digest(module), "toolkit": toolkit_digest()} | more


def _manifest(family: str, module: str) -> Manifest | None:
    """Return the manifest of a family; reading only its own file is ten times faster than looking for it."""
    own = resources.model_audits() / f"{family}.yaml"
    if own.is_file() and (manifest := load_manifest(own)).module == module:
        return manifest
    return find_manifest(module)


def _of_code(stamp: Stamp) -> Iterator[str]:
    if stamp.mlx != (here := minor(version("mlx"))):
        yield f"stamped with mlx {stamp.mlx}, installed is {here}"
    names = {
        "model": f"the source of {stamp.module}",
        "toolkit": "mlx-audit's caches, adapters or decode",
        "manifest": f"the manifest of {stamp.family}",
        "adapter": f"the adapter of {stamp.module}",
        PREFIX: "mlx-audit's prefix reuse",
    }
    try:
        digests = stamp_digests(stamp.family, stamp.module, stamp.claims)
    except (NotCompileCapable, ManifestError) as error:
        yield str(error)
        return
    except (OSError, SyntaxError) as error:
        yield f"{names['model']} cannot be read: {error}"
        return
    for name in dict.fromkeys([*digests, *stamp.digests]):
        if stamp.digests.get(name) != digests.get(name):
            yield f"{names.get(name, name)} changed since"


def _of_verdict(stamp: Stamp) -> Iterator[str]:
    """The verdict follows from the checks, or nothing that the stamp says is believed."""
    checks = [
        CheckResult(code=c.code, name=c.code, tier=c.tier, status=c.status, reason=c.reason)
        for c in stamp.checks
    ]
    stated = [(DECODE, stamp.verdict), *((name, claim.verdict) for name, claim in stamp.claims.items())]
    for claim, verdict in dict.fromkeys(stated):
        found = decide_today(checks, limits=stamp.limits, claim=claim)
        # A process that died before any check has a verdict all the same, though a bad one.
        if verdict != found.name and (checks or verdict in ("capable", "limited")):
            why = f": {found.reason}" if found.name == "undecided" else ""
            yield f"it says {verdict}, and its checks say {found.name}{why}"


def _of_files(stamp: Stamp, folder: Path, listener: Listener | None) -> Iterator[str]:
    try:
        there = set(model_files(folder))
    except OSError as error:
        yield f"the folder cannot be read: {error.strerror}"
        return
    same_size = []
    for name, stamped in sorted(stamp.files.items()):
        if name not in there:
            yield f"{name} is gone since"
            continue
        try:
            size = state_of(folder / name)[2]
        except OSError as error:
            yield f"{name} cannot be read: {error.strerror}"
            continue
        if size != stamped.bytes:
            yield f"{name} changed since: {size:,} bytes, stamped were {stamped.bytes:,}"
        else:
            same_size.append(name)
    yield from (f"{name} was added since" for name in sorted(there - stamp.files.keys()))
    try:
        hashed = hash_files(folder, same_size, listener)
    except OSError as error:
        yield f"{Path(str(error.filename)).name} cannot be read: {error.strerror}"
        return
    for name, found in hashed.items():
        if found.sha256 != stamp.files[name].sha256:
            yield f"{name} changed since (sha256)"


def _self_digest(body: Mapping[str, Any]) -> str:
    text = json.dumps({k: v for k, v in body.items() if k != "digest"}, sort_keys=True, ensure_ascii=False)
    # Half a surrogate pair, which JSON can spell, has no UTF-8 of its own.
    return f"sha256:{hashlib.sha256(text.encode(errors='surrogatepass')).hexdigest()}"
