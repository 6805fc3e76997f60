"""What a record must be of to count here and now: the code that is installed, and when a record lapses."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from mlx_audit.errors import NotCompileCapable
from mlx_audit.evidence.digests import (
    file_files,
    manifest_digest,
    model_files,
    prefix_files,
    toolkit_files,
    total,
)
from mlx_audit.evidence.record_schema import Record
from mlx_audit.evidence.registered import adapter_code, adapter_total
from mlx_audit.manifests import Manifest

PREFIX = "prefix"
"""Name of the digest on which only the claim that restored prefixes are right rests."""


class Code(NamedTuple):
    """The code and the statements that a record of a family rests on, as they are installed."""

    digests: dict[str, str]
    """Of `model`, `toolkit` and `manifest`; of `adapter` only where a registered one takes the generic one's place."""
    files: dict[str, dict[str, str]]
    """By name of a digest, that of each file."""
    adapter: str
    """The class of the registered adapter; empty where there is none."""


def current_code(manifest: Manifest) -> Code:
    """Return what a record of a family must be of to be valid here and now.

    Raises:
        NotCompileCapable: it is not clear which adapter serves the family, or its source cannot be read.
        OSError: a file of the model is not there.
    """
    if manifest.module.endswith(".py"):
        model = file_files(manifest.path.parent / manifest.module)
    else:
        model = model_files(manifest.module)
    files = {"model": model, "toolkit": toolkit_files()}
    digests = {name: total(found) for name, found in files.items()} | {"manifest": manifest_digest(manifest)}
    if (adapter := adapter_code(manifest.module)) is None:
        return Code(digests, files, "")
    value, files["adapter"] = adapter
    return Code({**digests, "adapter": adapter_total(value, files["adapter"])}, files, value)


def current_digests(manifest: Manifest) -> dict[str, str]:
    """Return the digests of `current_code`."""
    return current_code(manifest).digests


def minor(version: str) -> str:
    """Return `0.32` for `0.32.4`."""
    return ".".join(version.split(".")[:2])


class Staleness(NamedTuple):
    """Why a record no longer counts, and the files that decided it."""

    reasons: list[str]
    files: list[str]


def staleness(record: Record, manifest: Manifest, *, mlx_version: str) -> list[str]:
    """Return why a record no longer counts, each reason naming what changed; empty when it is valid."""
    return lapse(record, manifest, mlx_version=mlx_version).reasons


def lapse(record: Record, manifest: Manifest, *, mlx_version: str) -> Staleness:
    """Return why a record no longer counts and which files changed, by relative name; both empty when it is valid."""
    reasons: list[str] = []
    if record.module != manifest.module:
        return Staleness([f"the record is about another module: {record.module}"], [])
    if record.mlx != minor(mlx_version):
        reasons.append(f"recorded with mlx {record.mlx}, installed is {minor(mlx_version)}")
    names = {
        "model": f"the source of {manifest.module}",
        "toolkit": "mlx-audit's caches, adapters or decode",
        "manifest": f"what {manifest.path.name} states",
        "adapter": f"the adapter of {manifest.module}",
    }
    try:
        code = current_code(manifest)
    except NotCompileCapable as error:
        return Staleness([*reasons, str(error)], [])
    except (OSError, SyntaxError) as error:
        return Staleness([*reasons, f"{names['model']} cannot be read: {error}"], [])
    changed: list[str] = []
    for name in dict.fromkeys([*code.digests, *record.digests]):
        if name != PREFIX and record.digests.get(name) != code.digests.get(name):
            files = _changes(record.files.get(name, {}), code.files.get(name, {}))
            reasons.append(f"{names.get(name, name)} changed since{_told(files)}")
            changed += [manifest.path.name] if name == "manifest" else files
    return Staleness([*reasons, *([] if reasons else _other_statements(record, manifest))], changed)


def _other_statements(record: Record, manifest: Manifest) -> Iterator[str]:
    """Yield what a record says of the manifest, and the manifest does not, though their digests agree."""
    for name, variant in record.variants.items():
        if (declared := manifest.variants.get(name)) is None:
            yield f"{manifest.path.name} has no variant {name}"
        elif variant.limits != declared.limits:
            yield f"{name} was recorded with other limits than {manifest.path.name} states"


def lapse_of_prefix(record: Record) -> Staleness:
    """Return why what a record says of restored prefixes no longer counts, beside what `lapse` finds."""
    now = prefix_files()
    if record.digests.get(PREFIX) == total(now):
        return Staleness([], [])
    files = _changes(record.files.get(PREFIX, {}), now)
    return Staleness([f"mlx-audit's prefix reuse changed since{_told(files)}"], list(files))


def _told(files: Mapping[str, str]) -> str:
    return f": {', '.join(f'{file} {how}' for file, how in files.items())}" if files else ""


def _changes(old: Mapping[str, str], new: Mapping[str, str]) -> dict[str, str]:
    """Return, by file, whether it was changed, added or removed."""
    found = {}
    for name in sorted({*old, *new}):
        if old.get(name) != new.get(name):
            found[name] = "added" if name not in old else "removed" if name not in new else "changed"
    return found
