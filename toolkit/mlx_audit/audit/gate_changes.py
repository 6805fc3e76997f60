"""Which families does a change touch? Asked of git: what differs from a revision, staged or not, and new files."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterable, Iterator
from pathlib import Path

from mlx_audit.errors import MlxAuditError, NotCompileCapable
from mlx_audit.evidence import digests
from mlx_audit.evidence.digests import OWN, model_path, model_paths, package
from mlx_audit.evidence.records import record_path
from mlx_audit.evidence.registered import adapter_files, registered_adapter
from mlx_audit.evidence.standing import Evidence
from mlx_audit.manifests import Manifest

_TOOLS = (*OWN, "prefix", "checks", "tracing", "source", "models", "manifests", "audit", "evidence")
"""Folders of the package on which a family's proof rests: what is digested, what finds the faults, and what judges."""

_LAYOUTS = ("", "src", "toolkit")
"""Where a repository keeps the package that it is installed as."""

_SECONDS = 60.0


class UnknownRevision(MlxAuditError):
    """There is no git repository here, or it has no such revision."""


class NotInstalled(MlxAuditError):
    """A package of the repository is installed from elsewhere, and is another one there."""


def changed_since(revision: str, folder: Path | None = None) -> frozenset[Path]:
    """Return the files that differ from a revision in the repository of a folder, as resolved absolute paths.

    Committed, staged, unstaged and untracked changes count; files that git ignores don't. Where mlx-lm or this package
    was installed from the repository as a copy, the copies of changed files are among them.

    Args:
        revision: A commit, as git names them. What looks like an option is refused.
        folder: Inside the repository; the working directory by default.

    Raises:
        UnknownRevision: no repository, no such revision, or no git.
        NotInstalled: a changed file of these packages is another one where it is installed.
    """
    here = folder or Path()
    if not revision or revision.startswith("-"):
        raise UnknownRevision(
            "no revision", where="--changed-since", found=repr(revision), allowed="a commit"
        )
    top = Path(_git(here, "rev-parse", "--show-toplevel").rstrip("\n"))
    commit = _git(here, "rev-parse", "--verify", "--end-of-options", f"{revision}^{{commit}}", about=revision)
    options = ("--name-only", "-z", "--no-renames", "--no-ext-diff", "--ignore-submodules=none")
    outputs = (
        _git(top, "diff", *options, commit.strip(), "--"),
        _git(top, "diff", "--cached", *options, commit.strip(), "--"),
        _git(top, "ls-files", "--others", "--exclude-standard", "-z"),
    )
    names = {name for output in outputs for name in output.split("\0") if name}
    changed = frozenset(top.resolve() / name for name in names)
    return changed | frozenset(_installed_copies(top.resolve(), changed))


def _installed_copies(top: Path, changed: Iterable[Path]) -> Iterator[Path]:
    """Yield what changed files of mlx-lm's models and of the tool's parts are installed as, where that is a copy."""
    models = digests.mlx_lm_models().resolve()
    installed = {Path("mlx_lm", "models"): models}
    installed |= {Path("mlx_audit", part): package().resolve() / part for part in _TOOLS}
    for file in changed:
        for layout in _LAYOUTS:
            for name, copies in installed.items():
                sources = top / layout / name
                if file.suffix == ".py" and file.is_relative_to(sources) and sources != copies:
                    yield _copy_of(file, copies / file.relative_to(sources))


def _copy_of(file: Path, copy: Path) -> Path:
    if _bytes(file) != _bytes(copy):
        raise NotInstalled(
            "what is installed is not what changed here, so that a gate would say nothing of the change",
            where=str(file),
            found=str(copy),
            fix="install this repository first: pip install -e .",
        )
    return copy


def _bytes(file: Path) -> bytes | None:
    return file.read_bytes() if file.is_file() else None


def touched(evidence: Evidence, changed: frozenset[Path], records: Iterable[Path]) -> bool:
    """Return whether a family's manifest, record, configurations or code, or the tool itself, are among changed files.

    Args:
        evidence: The record of the family, which also names files that are gone.
        changed: Resolved paths.
        records: Folders of records.
    """
    return any(_is_changed(path, changed) for path in _files(evidence, records))


def _files(evidence: Evidence, records: Iterable[Path]) -> Iterator[Path]:
    manifest = evidence.manifest
    yield manifest.path
    for name in manifest.configurations:
        yield manifest.configuration_path(name)
    for folder in records:
        yield record_path(folder, manifest.family, evidence.backend)
    yield from model_paths(manifest)
    recorded = evidence.record.files.get("model", {}) if evidence.record is not None else {}
    for name in recorded:  # also what was deleted since
        yield model_path(manifest, name)
    yield from _adapter(manifest)
    for part in _TOOLS:
        yield package() / part


def _adapter(manifest: Manifest) -> Iterator[Path]:
    try:
        if (entry := registered_adapter(manifest.module)) is not None:
            yield from adapter_files(entry)
    except (OSError, SyntaxError, ValueError, ImportError, AttributeError, NotCompileCapable):
        return  # the record says so: its adapter cannot be read


def _is_changed(path: Path, changed: frozenset[Path]) -> bool:
    """Whether a file, or the submodule that it lies in, is changed, or something below a folder."""
    place = path.resolve()
    if place in changed or any(parent in changed for parent in place.parents):
        return True
    return place.suffix == "" and any(place in file.parents and file.suffix == ".py" for file in changed)


def _git(folder: Path, *arguments: str, about: str | None = None) -> str:
    # Nothing that the repository's own configuration names is started.
    command = ["git", "-c", "core.fsmonitor=false", *arguments]
    environment = {**os.environ, "LC_ALL": "C", "GIT_OPTIONAL_LOCKS": "0"}
    try:
        done = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, check=False, timeout=_SECONDS
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UnknownRevision("git cannot be asked", where="--changed-since", found=error) from error
    if done.returncode == 0:
        return os.fsdecode(done.stdout)
    if about is not None:
        raise UnknownRevision(
            "no such revision",
            where="--changed-since",
            found=about,
            allowed="a commit that this clone has",
            fix="git fetch origin, and git fetch --unshallow in a shallow clone (fetch-depth: 0 in a workflow)",
        )
    found = os.fsdecode(done.stderr).strip().splitlines()
    raise UnknownRevision(
        "no usable git repository",
        where=str(folder.absolute()),
        found=found[0] if found else None,
        fix="run it inside the repository, or without --changed-since",
    )
