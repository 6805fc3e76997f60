"""`mlx-audit draft`: a manifest for a model that has none, with topology and tiny configuration filled in."""

from __future__ import annotations

import re
import shutil
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mlx_audit.cli import _choices, _console, _files
from mlx_audit.errors import MlxAuditError

if TYPE_CHECKING:
    from mlx_audit.manifests.drafting import Draft
    from mlx_audit.models.target import Target as Resolved

Target = Annotated[str, typer.Argument(metavar="TARGET", help="A family, model .py file, or checkpoint.")]
Config = Annotated[Path | None, typer.Option("--config", help="The config.json of a real model.")]
Output = Annotated[Path | None, typer.Option("-o", "--output", help="Write to a file instead of stdout.")]
Force = Annotated[bool, typer.Option("--force", help="Write over an existing file.")]
Timeout = Annotated[float, typer.Option("--timeout", min=0.1, help="Seconds that it may take.")]


class CannotBeStated(MlxAuditError):
    """A manifest has no words for what the model is."""

    exit_code = 4


def draft(
    target: Target,
    config: Config = None,
    output: Output = None,
    force: Force = False,
    timeout: Timeout = 600.0,
) -> int:
    """Write a manifest: topology read from the live caches, a tiny configuration, hazards; the claim is left to you."""
    from mlx_audit.audit.drafting import draft_in_child
    from mlx_audit.audit.request import Options, Request
    from mlx_audit.manifests.drafting import manifest_text
    from mlx_audit.models.target import resolve_target

    _choices.seconds("--timeout", timeout)
    resolved = resolve_target(_choices.target(target), config)
    _require_configuration(resolved)
    folder = _folder(resolved, config, output, force=force)
    kept = _Kept.of(resolved, config, folder, output)
    drafted, printed = draft_in_child(Request.of(resolved, Options(), config), timeout)
    # What the model's code prints must not mix with the manifest.
    for line in printed.splitlines():
        _console.note(line)
    text = manifest_text(_with_configuration(drafted, config, kept))
    _require_valid(text, resolved, kept)
    if output is None:
        print(text, end="")
        return 0
    written = str(output)
    if kept is not None and kept.write():
        written += f" and configurations/{kept.place.name}"
    _write(output, text)
    following = f"adapt {output} --as patch" if drafted.hazardous else f"run {output}"
    _console.note(f"wrote {written}; next: mlx-audit {following}")
    return 0


def _require_configuration(target: Resolved) -> None:
    if target.kind == "manifest":
        raise MlxAuditError(
            "this is a manifest already", where=target.text, allowed="a family, .py or checkpoint"
        )
    if target.config is None:
        raise MlxAuditError(
            "a draft needs the configuration of a real model",
            where=target.text,
            fix=f"mlx-audit draft {target.text} --config config.json",
        )


def _folder(target: Resolved, config: Path | None, output: Path | None, *, force: bool) -> Path:
    """Return the folder of the manifest, or refuse before any work what could not be written or loaded there."""
    if output is None:
        return target.file.parent if target.file is not None else Path.cwd()
    place = _choices.output("-o", output)
    _files.require_no_input("-o", place, _files.inputs(replace(target, manifest=None), config))
    if place.exists() and not force:
        raise MlxAuditError("the file exists", where=f"-o {output}", fix="--force writes over it")
    if target.file is not None and place.parent.resolve() != target.file.parent.resolve():
        raise MlxAuditError(
            "a manifest must lie beside its model file",
            where=f"-o {output}",
            fix=f"-o {target.file.parent / place.name}, or copy {target.file.name} to {place.parent} first",
        )
    return place.parent


@dataclass(frozen=True)
class _Kept:
    """The real model's configuration, and where it lies among those that belong to the manifest."""

    text: str
    place: Path

    @classmethod
    def of(cls, target: Resolved, config: Path | None, folder: Path, output: Path | None) -> _Kept | None:
        """Return what `run` will trace at full size; None where it is neither there nor to be written.

        Raises:
            MlxAuditError: another configuration has that name.
        """
        source = config or (
            target.folder / "config.json" if target.folder and target.folder.is_dir() else None
        )
        if source is None:
            return None
        text = source.read_text(encoding="utf-8")
        place = folder / "configurations" / f"{_name(source, target.family)}.json"
        if output is None or (output.exists() and not output.is_file()):
            there = place.is_file() and place.resolve() == source.resolve()
            return cls(text, place) if there else None
        if place.exists() and place.read_text(encoding="utf-8", errors="replace") != text:
            raise MlxAuditError(
                "another configuration of this name is there already",
                where=str(place),
                fix=f"remove it, or copy {source} to another name than {place.name}, and give that to --config",
            )
        return cls(text, place)

    def write(self) -> bool:
        """Write it where it is not there yet."""
        if self.place.exists():
            return False
        try:
            self.place.parent.mkdir(exist_ok=True)
        except OSError as error:
            raise MlxAuditError(
                "the folder cannot be made", where=str(self.place.parent), found=error.strerror
            ) from None
        _write(self.place, self.text)
        return True


def _name(source: Path, family: str) -> str:
    """Return what a manifest may call a configuration; `config` says nothing, the family's name does."""
    for text in (source.stem, family):
        name = re.sub(r"[^A-Za-z0-9._-]", "_", text).lstrip("._-")[:128]
        if name not in ("", "config"):
            return name
    return "real"


def _with_configuration(drafted: Draft, config: Path | None, kept: _Kept | None) -> Draft:
    """Name the configuration that belongs to the manifest; else say how one gets there."""
    if kept is not None:
        return drafted.model_copy(update={"configurations": [kept.place.stem]})
    if config is None:
        return drafted
    note = "put real config.json files into configurations/ and name them here, without .json: configurations: [NAME]"
    return drafted.model_copy(update={"notes": {**drafted.notes, "configurations": [note]}})


def _require_valid(text: str, target: Resolved, kept: _Kept | None) -> None:
    """Load the draft as any manifest is loaded, where its files would be found."""
    from mlx_audit.manifests import ManifestError, load_manifest

    with tempfile.TemporaryDirectory() as scratch:
        if target.file is not None:
            shutil.copyfile(target.file, Path(scratch) / target.file.name)
        if kept is not None:
            _Kept(kept.text, Path(scratch) / "configurations" / kept.place.name).write()
        place = Path(scratch) / "draft.yaml"
        place.write_text(text, encoding="utf-8")
        try:
            load_manifest(place)
        except ManifestError as error:
            raise CannotBeStated(
                "the draft would be no valid manifest", where=target.text, found=error.problems[0].what
            ) from error


def _write(path: Path, text: str) -> None:
    """Write all or nothing."""
    from mlx_audit.evidence.records import write_atomically

    try:
        write_atomically(path.absolute(), text)
    except OSError as error:
        raise MlxAuditError("the file cannot be written", where=str(path), found=error.strerror) from None
