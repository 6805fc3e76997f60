"""`mlx-audit prefix`: what a store of prefixes holds, and whether it is as it was written."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mlx_audit.cli import _console

Folder = Annotated[Path, typer.Argument(metavar="DIR", help="A folder that `PrefixCache.save` wrote.")]
Verify = Annotated[bool, typer.Option("--verify", help="Compare every byte with its checksum.")]
Json = Annotated[bool, typer.Option("--json", help="Write as JSON to stdout.")]


def prefix(folder: Folder, verify: Verify = False, json: Json = False) -> int:
    """Show a store of prefixes: its tree, entries, bytes, cache kinds and fingerprint; no model is loaded."""
    from mlx_audit.cli import _store

    store = _store.look(folder, verify=verify)
    if json:
        _console.print_json(_store.as_dict(store))
    else:
        _store.show(_console.stdout(), store)
    return 0
