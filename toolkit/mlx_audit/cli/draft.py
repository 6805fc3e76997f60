"""`mlx-audit draft`: a manifest for a model that has none, with topology and tiny configuration filled in."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mlx_audit.cli import _choices, _console
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
    folder = _folder(resolved, output, force=force)
    drafted, printed = draft_in_child(Request.of(resolved, Options(), config), timeout)
    # What the model's code prints must not mix with the manifest.
    for line in printed.splitlines():
        _console.note(line)
    text = manifest_text(_with_configuration(drafted, config, folder))
    _require_valid(text, resolved)
    if output is None:
        print(text, end="")
    else:
        _write(output, text)
        _console.note(f"wrote {output}; next: mlx-audit run {output}")
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


def _folder(target: Resolved, output: Path | None, *, force: bool) -> Path:
    """Return the folder of the manifest, or refuse before any work what could not be written or loaded there."""
    if output is None:
        return target.file.parent if target.file is not None else Path.cwd()
    place = _choices.output("-o", output)
    if place.exists() and not force:
        raise MlxAuditError("the file exists", where=f"-o {output}", fix="--force writes over it")
    if target.file is not None and place.parent.resolve() != target.file.parent.resolve():
        raise MlxAuditError(
            "a manifest must lie beside its model file",
            where=f"-o {output}",
            fix=f"-o {target.file.parent / place.name}, or copy {target.file.name} to {place.parent} first",
        )
    return place.parent


def _with_configuration(drafted: Draft, config: Path | None, folder: Path) -> Draft:
    """Name the configuration where it lies among those that belong to the manifest; else say how it gets there."""
    from mlx_audit.manifests.schema import CONFIGURATION

    if config is None:
        return drafted
    known = folder / "configurations" / f"{config.stem}.json"
    if CONFIGURATION.fullmatch(config.stem) and known.is_file() and known.resolve() == config.resolve():
        return drafted.model_copy(update={"configurations": [config.stem]})
    note = "put real config.json files into configurations/ and name them here, without .json: configurations: [NAME]"
    return drafted.model_copy(update={"notes": {**drafted.notes, "configurations": [note]}})


def _require_valid(text: str, target: Resolved) -> None:
    """Load the draft as any manifest is loaded, where its files would be found."""
    from mlx_audit.manifests import ManifestError, load_manifest

    with tempfile.TemporaryDirectory() as scratch:
        if target.file is not None:
            shutil.copyfile(target.file, Path(scratch) / target.file.name)
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
