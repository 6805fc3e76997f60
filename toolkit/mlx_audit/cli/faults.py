"""`mlx-audit faults`: plants deliberate defects, and shows which check sees which."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mlx_audit.audit.planted import PLANT
from mlx_audit.cli import _choices, _console
from mlx_audit.errors import MlxAuditError

if TYPE_CHECKING:
    from mlx_audit.audit.kill_matrix import KillMatrix, Stack

_PANELS = {"quick": "named", "ci": "core", "nightly": "all"}

Targets = Annotated[
    list[str] | None,
    typer.Argument(metavar="TARGET...", help="Families or manifests; the faults go into their tiny models."),
]
All = Annotated[bool, typer.Option("--all", help="A stack of every kind of cache.")]
Profile = Annotated[
    str,
    typer.Option(
        "--profile",
        help="quick: each fault once, its own check alone. ci: everywhere, with the core checks. "
        "nightly: everywhere, with all checks.",
    ),
]
Only = Annotated[list[str] | None, typer.Option("--only", help="Only these faults; commas allowed.")]
Listed = Annotated[bool, typer.Option("--list", help="Print the faults, and plant nothing.")]
Config = Annotated[Path | None, typer.Option("--config", help="The config.json of a model file.")]
Json = Annotated[str | None, typer.Option("--json", metavar="FILE", help="Write the matrix; - is stdout.")]
Record = Annotated[bool, typer.Option("--record", help="Keep a summary in the record of each target.")]
Jobs = Annotated[int | None, typer.Option("--jobs", min=1, help="Processes at a time; one a processor.")]


def faults(
    targets: Targets = None,
    all: All = False,  # noqa: A002 - named like its option
    profile: Profile = "ci",
    only: Only = None,
    listed: Listed = False,
    config: Config = None,
    json: Json = None,
    record: Record = False,
    jobs: Jobs = None,
) -> int:
    """Plant faults and print the kill matrix: exit 0 when each is seen by the check that is named for it, else 1."""
    from mlx_audit.faults import FAULTS

    _choices.one_of("--profile", profile, list(_PANELS))
    names = _choices.each_of("--only", only, sorted(FAULTS)) if only else sorted(FAULTS)
    if listed:
        return _print_list(names)
    if not targets and not all:
        raise MlxAuditError("no target", allowed="TARGET..., or --all", fix="mlx-audit faults --all")
    if os.environ.get(PLANT):
        raise MlxAuditError("a fault is planted everywhere already", where=PLANT, fix=f"unset {PLANT}")
    if json not in (None, "-"):
        _choices.output("--json", json)
    if record:
        _require_recordable(targets or [], only, config)
    _choices.require_temporary_folder()
    started = time.perf_counter()
    once = profile == "quick" and not record
    stacks = [*(_default_stacks(names, once) if all else []), *_stacks(targets or [], names, config)]
    matrix = _plant(stacks, profile, once, jobs)
    code = _report(matrix, json, time.perf_counter() - started)
    if record:
        _record(matrix, stacks, profile)
    return code


def _require_recordable(targets: list[str], only: list[str] | None, config: Path | None) -> None:
    """Refuse, before any work, what no record has room for, or what there is no record of."""
    from mlx_audit.audit.fault_summaries import require_record
    from mlx_audit.models.target import resolve_target

    if only or config is not None or not targets:
        raise MlxAuditError(
            "a summary is kept of all faults in families that have records",
            where="--record",
            fix="name the families, without --only and --config",
        )
    for text in targets:
        require_record(resolve_target(_choices.target(text)))


def _record(matrix: KillMatrix, stacks: list[Stack], profile: str) -> None:
    from mlx_audit.audit.fault_summaries import record_summaries

    for stack in stacks:
        if not stack.name:  # a target; the stacks of every kind of cache have names, and no records
            _console.note(record_summaries(matrix, stack.request, profile))


def _print_list(names: list[str]) -> int:
    from mlx_audit.faults import FAULTS

    width = max(map(len, names))
    for name in names:
        print(f"{name.ljust(width)}  {FAULTS[name].by}  {FAULTS[name].about}")
    return 0


def _default_stacks(names: list[str], once: bool) -> list[Stack]:
    """The stacks that together have every kind of cache; with `once`, each fault in the first that suits it."""
    from mlx_audit.audit.kill_matrix import Stack
    from mlx_audit.audit.request import Options, Request
    from mlx_audit.faults import FAULTS
    from mlx_audit.faults.topologies import TOPOLOGIES

    stacks, seen = [], set[str]()
    for topology in TOPOLOGIES:
        chosen = [
            name
            for name in names
            if FAULTS[name].applies(topology.traits)
            and FAULTS[name].by not in topology.unsound
            and not (once and name in seen)
        ]
        seen |= set(chosen)
        request = Request.of(topology.target(), Options()).model_copy(update={"text": topology.name})
        variant = topology.variant or None
        stacks.append(Stack(topology.name, request, variant, tuple(chosen), topology.unsound))
    return stacks


def _stacks(targets: list[str], names: list[str], config: Path | None) -> list[Stack]:
    from mlx_audit.audit.kill_matrix import Stack
    from mlx_audit.audit.request import Options, Request
    from mlx_audit.models.target import resolve_target

    found = [resolve_target(_choices.target(name), config) for name in dict.fromkeys(targets)]
    return [Stack("", Request.of(target, Options()), None, tuple(names)) for target in found]


def _plant(stacks: list[Stack], profile: str, once: bool, jobs: int | None) -> KillMatrix:
    from mlx_audit.audit.kill_matrix import plant_all
    from mlx_audit.cli._progress import progress

    with progress() as listener:
        return plant_all(stacks, _PANELS[profile], once=once, jobs=jobs, listener=listener)  # type: ignore[arg-type]


def _report(matrix: KillMatrix, json: str | None, seconds: float) -> int:
    """Write what was asked for, and return the exit code."""
    from mlx_audit.audit.exit_codes import CLAIM_FAILED, HOLDS, NOTHING, UNDECIDED
    from mlx_audit.cli import _matrix

    _matrix.show(_console.stderr() if json == "-" else _console.stdout(), matrix)
    if json is not None:
        _write(json, matrix)
    code = HOLDS
    if matrix.failed or matrix.unhealthy:
        code = UNDECIDED
    elif not matrix.killed and not matrix.survivors:
        code = NOTHING
    if matrix.survivors:
        code = CLAIM_FAILED
    print(_matrix.summary(matrix, seconds), file=sys.stderr if json == "-" else sys.stdout)
    return code


def _write(file: str, matrix: KillMatrix) -> None:
    from json import dumps

    from mlx_audit.evidence.records import write_atomically

    text = dumps(matrix.as_json(), indent=1, ensure_ascii=False) + "\n"
    if file == "-":
        print(text, end="")
    else:
        write_atomically(Path(file).absolute(), text)
