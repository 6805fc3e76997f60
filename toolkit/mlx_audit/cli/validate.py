"""`mlx-audit validate`: the strict check of manifests."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from mlx_audit.cli import _console

Manifests = Annotated[list[Path] | None, typer.Argument(help="Manifest files; all shipped ones by default.")]
Json = Annotated[bool, typer.Option("--json", help="Write the problems as JSON to stdout.")]


def validate(manifests: Manifests = None, json: Json = False) -> int:
    """Check manifests strictly: file:line:column, what, found, allowed, did you mean."""
    from mlx_audit import resources
    from mlx_audit.manifests.loader import duplicates, load_manifest
    from mlx_audit.manifests.problems import ManifestError, Problem

    paths = manifests or sorted(resources.model_audits().glob("*.yaml"))
    problems: list[Problem] = []
    good = []
    for path in paths:
        try:
            good.append(load_manifest(path))
        except ManifestError as error:
            problems += error.problems
    problems += duplicates(good)
    if json:
        _console.print_json({"manifests": len(paths), "problems": [asdict(problem) for problem in problems]})
    else:
        for problem in problems:
            _console.note(str(problem))
    if not paths:
        _console.note("no manifests found")
        return 3
    wrong = len({problem.file for problem in problems})
    _console.note(
        f"{_counted(len(paths), 'manifest')}: {len(paths) - wrong} valid, {wrong} wrong, "
        f"{_counted(len(problems), 'problem')}"
    )
    return 2 if problems else 0


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
