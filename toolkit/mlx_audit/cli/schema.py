"""`mlx-audit schema`: the JSON Schema of manifests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from mlx_audit.cli import _choices, _console, _files
from mlx_audit.errors import MlxAuditError

Output = Annotated[Path | None, typer.Option("-o", "--output", help="Write to this file instead of stdout.")]
Check = Annotated[
    Path | None, typer.Option("--check", help="Compare with this file; exit 1 when it differs.")
]


def schema(output: Output = None, check: Check = None) -> int:
    """Print the manifest's JSON Schema, write it, or check that a file has it."""
    from mlx_audit.manifests.schema import manifest_schema

    text = json.dumps(manifest_schema(), indent=2, ensure_ascii=False) + "\n"
    if check is not None:
        return _compare(check, text)
    if output is not None:
        _write(output, text)
    else:
        print(text, end="")
    return 0


def _compare(path: Path, text: str) -> int:
    try:
        same = _files.compared(path).read_text(encoding="utf-8") == text
    except (OSError, UnicodeDecodeError) as error:
        raise MlxAuditError("the schema cannot be read", where=str(path), found=error) from None
    if not same:
        _console.note(f"{path}: differs from the manifest models; fix: mlx-audit schema -o {path}")
    return 0 if same else 1


def _write(path: Path, text: str) -> None:
    """Write all or nothing: a killed run leaves the old file."""
    from mlx_audit.evidence.records import write_atomically

    try:
        write_atomically(_choices.output("-o", path), text)
    except OSError as error:
        raise MlxAuditError("the file cannot be written", where=str(path), found=error.strerror) from None
