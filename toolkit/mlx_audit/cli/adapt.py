"""`mlx-audit adapt`: the adapter of a family as a module, or a patch of the model's own source."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mlx_audit.cli import _choices, _console, _files
from mlx_audit.errors import MlxAuditError, TargetError

if TYPE_CHECKING:
    from mlx_audit.models.target import Target as ResolvedTarget

UP_TO_DATE, STALE, MISSING = 0, 1, 2
_MOST_LINES = 40
"""Of a difference that is shown."""

Target = Annotated[
    str, typer.Argument(metavar="TARGET", help="A family, manifest, model .py file, or checkpoint.")
]
As = Annotated[
    str, typer.Option("--as", help="module: written from the manifest; patch: a diff of the model's source.")
]
Config = Annotated[Path | None, typer.Option("--config", help="Configuration that a patch is audited with.")]
Check = Annotated[
    Path | None,
    typer.Option("--check", metavar="FILE", help="Compare FILE: exit 0 up to date, 1 stale, 2 missing."),
]
Output = Annotated[Path | None, typer.Option("-o", "--output", help="Write to this file instead of stdout.")]
Force = Annotated[bool, typer.Option("--force", help="Overwrite a file that mlx-audit did not make.")]
Profile = Annotated[str, typer.Option("--profile", help="Of a patch's audit: quick, ci or nightly.")]
Json = Annotated[
    str | None,
    typer.Option("--json", metavar="FILE", help="Write the results of a patch's audit; - is stdout."),
]
Timeout = Annotated[float, typer.Option("--timeout", min=0.1, help="Seconds that a patch's audit may take.")]


def adapt(
    target: Target,
    as_: As = "module",
    config: Config = None,
    check: Check = None,
    output: Output = None,
    force: Force = False,
    profile: Profile = "quick",
    json: Json = None,
    timeout: Timeout = 600.0,
) -> int:
    """Write the adapter of a family as a Python module, or as a patch of the model's source, or check such a file."""
    _choices.one_of("--as", as_, ("module", "patch"))
    if check is not None and output is not None:
        raise MlxAuditError("--check does not go with -o", fix="leave one of them out")
    if as_ == "patch":
        from mlx_audit.cli._patch import adapt_as_patch

        return adapt_as_patch(
            target,
            config,
            check=check,
            output=output,
            force=force,
            profile=profile,
            json=json,
            timeout=timeout,
        )
    for option, value in (("--config", config), ("--json", json)):
        if value is not None:
            raise MlxAuditError(
                f"{option} is for patches: a module serves every configuration", fix="leave it out"
            )
    resolved = _resolved(_choices.target(target))
    return _check(resolved, check) if check is not None else _write(resolved, output, force)


def _resolved(text: str) -> ResolvedTarget:
    from mlx_audit.adapters.generation import undeclared
    from mlx_audit.models.target import resolve_target

    if Path(text).suffix == ".py":
        raise undeclared(text)
    try:
        return resolve_target(text)
    except TargetError as error:
        if "--config" in str(error.fix):  # a model that is there, but in no manifest
            raise undeclared(text) from error
        raise


def _check(target: ResolvedTarget, file: Path) -> int:
    from mlx_audit.adapters.generation import is_current

    fix = f"mlx-audit adapt {target.text} --as module -o {file}"
    try:
        current, difference = is_current(target, _files.compared(file))
    except FileNotFoundError:
        _console.note(f"{file}: missing; fix: {fix}")
        return MISSING
    if current:
        return UP_TO_DATE
    lines = difference.splitlines()
    for line in lines[:_MOST_LINES]:
        _console.note(line)
    if len(lines) > _MOST_LINES:
        _console.note(f"… and {len(lines) - _MOST_LINES} more lines")
    _console.note(f"{file}: stale; fix: {fix}")
    return STALE


def _write(target: ResolvedTarget, output: Path | None, force: bool) -> int:
    """Write all or nothing: a killed run leaves the old file."""
    from mlx_audit.adapters.generation import generated_text
    from mlx_audit.evidence.records import write_atomically

    text = generated_text(target)
    if output is None:
        print(text, end="")
        return 0
    place = _choices.output("-o", output)
    _files.require_no_input("-o", place, _files.inputs(target))
    if not force:
        _require_ours(place)
    write_atomically(place, text)
    return 0


def _require_ours(place: Path) -> None:
    """Refuse to overwrite what somebody wrote by hand."""
    from mlx_audit.adapters.generation import is_generated

    if place.is_file():
        with place.open(encoding="utf-8", errors="replace") as file:
            begin = file.readline(1000)
        if begin and not is_generated(begin):
            raise MlxAuditError(
                "the file was not made by mlx-audit adapt",
                where=str(place),
                found=begin.strip()[:80],
                fix="name another file, or add --force",
            )
