"""`mlx-audit gate`: do the committed claims still hold on what is installed?"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mlx_audit.cli import _choices, _console
from mlx_audit.errors import MlxAuditError

if TYPE_CHECKING:
    from mlx_audit.audit.gate import Gated

Targets = Annotated[
    list[str] | None,
    typer.Argument(metavar="TARGET...", help="Families or manifests; all shipped ones by default."),
]
Backend = Annotated[
    list[str] | None,
    typer.Option(
        "--backend", help="Whose records: cpu, cuda, metal; commas allowed. This machine's by default."
    ),
]
Records = Annotated[
    Path | None, typer.Option("--records", metavar="DIR", help="Look for records in this folder alone.")
]
ChangedSince = Annotated[
    str | None,
    typer.Option(
        "--changed-since",
        metavar="REV",
        help="Only families that the changes since this commit of git touch.",
    ),
]
Strict = Annotated[
    bool, typer.Option("--strict", help="Run the recorded audits again, and compare what they find.")
]
Json = Annotated[bool, typer.Option("--json", help="Write the claims as JSON to stdout.")]
Timeout = Annotated[
    float, typer.Option("--timeout", min=0.1, help="Seconds that one audit of --strict may take.")
]
Jobs = Annotated[
    int | None, typer.Option("--jobs", min=1, help="Audits of --strict at a time; one a processor.")
]


def gate(
    targets: Targets = None,
    backend: Backend = None,
    records: Records = None,
    changed_since: ChangedSince = None,
    strict: Strict = False,
    json: Json = False,
    timeout: Timeout = 600.0,
    jobs: Jobs = None,
) -> int:
    """Compare records with what is installed: exit 0 all claims hold, 1 a claim failed, 2 usage, 3 nothing collected,
    4 cannot be decided."""
    from mlx_audit.audit import gate as found_by

    started = time.perf_counter()
    _choices.seconds("--timeout", timeout)
    if records is not None and not records.is_dir():
        raise MlxAuditError("no such folder of records", where="--records", found=records)
    backends = _backends(backend, strict)
    manifests = found_by.manifests_of([_choices.target(text) for text in targets or []])
    gated = found_by.gate(manifests, backends, records)
    untouched: list[str] = []
    if changed_since is not None:
        gated, untouched = _touched(gated, changed_since, records)
    if strict and gated:
        gated = _audit_again(gated, jobs, timeout)
    if records is not None:
        gated = found_by.mended_in(records, gated)
    code = found_by.exit_code(gated) if gated or not untouched else 0
    if json:
        _console.print_json(found_by.document(gated, code, strict=strict, untouched=untouched))
    _show(gated, untouched, changed_since, code, time.perf_counter() - started, json=json)
    return code


def _backends(named: list[str] | None, strict: bool) -> list[str]:
    from mlx_audit.audit.gate import BACKENDS
    from mlx_audit.evidence.environment import backend as this_backend

    here = this_backend()
    backends = _choices.each_of("--backend", named, BACKENDS) if named else [here]
    if strict and backends != [here]:
        raise MlxAuditError(
            "only the audits of this machine's backend can be run again",
            where="--strict",
            found=", ".join(backends),
            allowed=here,
            fix="leave --strict out: other records are compared with what is installed",
        )
    return backends


def _touched(gated: list[Gated], revision: str, records: Path | None) -> tuple[list[Gated], list[str]]:
    """Return what the changes since a revision touch, and the names of the families that they don't."""
    from mlx_audit.audit.gate import folders_of
    from mlx_audit.audit.gate_changes import changed_since, touched

    changed = changed_since(revision)
    is_touched = [touched(one.evidence, changed, folders_of(one.evidence.manifest, records)) for one in gated]
    families = {one.evidence.manifest.family for one, found in zip(gated, is_touched, strict=True) if found}
    chosen = [one for one in gated if one.evidence.manifest.family in families]
    others = [one.evidence.manifest.family for one in gated if one.evidence.manifest.family not in families]
    return chosen, list(dict.fromkeys(others))


def _audit_again(gated: list[Gated], jobs: int | None, timeout: float) -> list[Gated]:
    from mlx_audit.audit.gate_strict import audit_again
    from mlx_audit.cli._progress import progress

    _choices.require_temporary_folder()
    with progress() as listener:
        return audit_again(gated, jobs=jobs, timeout=timeout, listener=listener)


def _show(
    gated: list[Gated], untouched: list[str], revision: str | None, code: int, seconds: float, *, json: bool
) -> None:
    from mlx_audit.audit.planted import planted_warning
    from mlx_audit.cli import _gate

    if not json:
        _gate.show(_console.stdout(), gated)
    if untouched and not gated:
        _console.note(f"nothing of these families changed since {revision}: {', '.join(untouched)}")
    elif untouched:
        _console.note(f"not touched since {revision}: {', '.join(untouched)}")
    if warning := planted_warning():
        _console.note(warning)
    text = _gate.summary(gated, code, seconds)
    print(text, file=sys.stderr if json else sys.stdout)
