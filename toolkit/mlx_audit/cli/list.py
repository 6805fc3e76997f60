"""`mlx-audit list`: families, variants, claims and the state of their records."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import typer

from mlx_audit.cli import _console
from mlx_audit.errors import clean

Rows: TypeAlias = "list[dict[str, Any]]"  # quoted: `list` is the verb below

if TYPE_CHECKING:
    from mlx_audit.manifests import Manifest

Json = Annotated[
    bool, typer.Option("--json", help="Write a matrix for CI to stdout: {include: [{family, variant, …}]}.")
]


def list(json: Json = False) -> int:  # noqa: A001 - the function is named like its verb
    """List families, variants, claims and the state of their records on this backend."""
    from mlx_audit.manifests import load_manifests

    rows = [row for manifest in load_manifests() for row in _rows(manifest)]
    if json:
        _console.print_json({"include": rows})
    else:
        _table(rows)
    if not rows:
        _console.note("no families found")
    return 0 if rows else 3


def _rows(manifest: Manifest) -> tuple[dict[str, object], ...]:
    from mlx_audit.evidence.codes import RESTORE
    from mlx_audit.evidence.environment import backend
    from mlx_audit.evidence.records import search_path
    from mlx_audit.evidence.standing import evidence_of, state_of

    evidence = evidence_of(manifest, backend(), search_path(working_directory=True))
    return tuple(
        {
            "family": manifest.family,
            "variant": name,
            "exactness": variant.exactness,
            "claims": variant.claims.model_dump(exclude_none=True),
            "limits": variant.limits,
            "rope": {item.kind: item.claim for item in manifest.rope},
            "configurations": len(manifest.configurations),
            "record": state_of(evidence, name),
            "prefix_record": state_of(evidence, name, RESTORE),
        }
        for name, variant in manifest.variants.items()
    )


def _table(rows: Rows) -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table("family", "variant", "exactness", "compiled decode", "prefix restore", "record", box=None)
    for row in rows:
        claims = row["claims"]
        cells = (row["family"], row["variant"], row["exactness"], claims["compiled_decode"])
        # No markup: what a record says is anybody's.
        table.add_row(*(Text(clean(cell)) for cell in (*cells, _restore(row), row["record"])))
    _console.stdout().print(table)


def _restore(row: dict[str, Any]) -> str:
    """What is claimed of restored prefixes, and the record where it says something else."""
    claimed: str = row["claims"].get("prefix_restore", "-")
    record = row["prefix_record"]
    return (
        claimed
        if record in (claimed, "none") and claimed in ("-", "undecided", record)
        else f"{claimed}: {record}"
    )
