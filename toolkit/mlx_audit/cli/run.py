"""`mlx-audit run`: the audit."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mlx_audit.cli import _choices, _console, _files, _repro
from mlx_audit.errors import MlxAuditError

if TYPE_CHECKING:
    from mlx_audit.audit.process import Child
    from mlx_audit.audit.request import Options, Request
    from mlx_audit.audit.runner import Outcome
    from mlx_audit.evidence.results import Result

Targets = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="TARGET...",
        help="Families, manifests, model .py files, checkpoints (folder, .gguf).",
    ),
]
All = Annotated[bool, typer.Option("--all", help="Every family that has a manifest.")]
Config = Annotated[Path | None, typer.Option("--config", help="Audit this config.json of each target.")]
Tier = Annotated[
    list[str] | None,
    typer.Option("--tier", help="Only these tiers: static, trace, numeric, checkpoint; commas allowed."),
]
Only = Annotated[list[str] | None, typer.Option("--only", help="Only these checks; commas allowed.")]
Profile = Annotated[str, typer.Option("--profile", help="How much to do: quick, ci or nightly.")]
Dtype = Annotated[str, typer.Option("--dtype", help="Of the tiny models: float32, bfloat16 or float16.")]
Seed = Annotated[
    int, typer.Option("--seed", min=0, max=_choices.MOST_SEED, help="Of weights, tokens and properties.")
]
Json = Annotated[str | None, typer.Option("--json", metavar="FILE", help="Write the results; - is stdout.")]
Record = Annotated[bool, typer.Option("--record", help="Store the evidence of claims that hold.")]
Timeout = Annotated[float, typer.Option("--timeout", min=0.1, help="Seconds that one target may take.")]
Repro = Annotated[
    Path | None,
    typer.Option("--repro", metavar="FILE", help="Write a failure as a script of mlx and mlx-lm alone."),
]
Jobs = Annotated[int | None, typer.Option("--jobs", min=1, help="Targets at a time; one a processor.")]


def run(
    targets: Targets = None,
    all: All = False,  # noqa: A002 - named like its option
    config: Config = None,
    tier: Tier = None,
    only: Only = None,
    profile: Profile = "quick",
    dtype: Dtype = "float32",
    seed: Seed = 0,
    json: Json = None,
    record: Record = False,
    timeout: Timeout = 600.0,
    jobs: Jobs = None,
    repro: Repro = None,
) -> int:
    """Audit targets: exit 0 all claims hold, 1 a claim failed, 2 usage, 3 nothing collected, 4 cannot be decided."""
    from mlx_audit.audit.process import Child

    started = time.perf_counter()
    _choices.seconds("--timeout", timeout)
    _choices.require_temporary_folder()
    # The child's imports take as long as ours; so it starts before anything is looked at.
    child = Child()
    try:
        options = _options(tier, only, profile, dtype, seed)
        options.repro = repro is not None
        requests = _requests(targets or [], all, config, options)
        if record:
            _require_recordable(requests)
        _require_writable(requests, json, repro)
        outcomes = _audit(requests, jobs, timeout, child)
    finally:
        child.kill()
    code = _report(outcomes, options, json, record, started)
    if repro is not None:
        _repro.write(outcomes, repro)
    return code


def _options(tier: list[str] | None, only: list[str] | None, profile: str, dtype: str, seed: int) -> Options:
    from mlx_audit.audit.request import Options
    from mlx_audit.checks.profiles import PROFILES
    from mlx_audit.evidence.codes import known_codes
    from mlx_audit.evidence.results import TIERS

    _choices.one_of("--profile", profile, list(PROFILES))
    _choices.one_of("--dtype", dtype, _choices.DTYPES)
    return Options.model_validate(
        {
            "tiers": _choices.each_of("--tier", tier, TIERS) if tier else list(TIERS),
            "only": _choices.each_of("--only", only, known_codes()) if only else [],
            "profile": profile,
            "dtype": dtype,
            "seed": seed,
        }
    )


def _requests(targets: list[str], every: bool, config: Path | None, options: Options) -> list[Request]:
    """Resolve all targets before any work."""
    from mlx_audit.audit.request import Request
    from mlx_audit.manifests import load_manifests
    from mlx_audit.models.target import resolve_target

    names = [*targets, *(manifest.family for manifest in load_manifests())] if every else targets
    names = list(dict.fromkeys(names))
    if not names and not every:
        raise MlxAuditError(
            "no target", allowed="TARGET..., or --all", fix="mlx-audit list shows the families"
        )
    if config is not None and every:
        raise MlxAuditError("--config does not go with --all", fix="name the target that it is for")
    return [Request.of(resolve_target(_choices.target(name), config), options, config) for name in names]


def _require_writable(requests: list[Request], json: str | None, repro: Path | None) -> None:
    if json in (None, "-") and repro is None:
        return
    read = [file for request in requests for file in _files.inputs(request.target(), request.config_path)]
    if json not in (None, "-"):
        _files.results("--json", json, read)
    if repro is not None:
        _files.require_no_input("--repro", _choices.output("--repro", repro), read)


def _require_recordable(requests: list[Request]) -> None:
    from mlx_audit.audit.recording import record_folder, require_recordable
    from mlx_audit.evidence.records import require_writable

    for request in requests:
        require_recordable(request)
        require_writable(record_folder(request), request.family)


def _audit(requests: list[Request], jobs: int | None, timeout: float, child: Child) -> list[Outcome]:
    from mlx_audit.audit.runner import run_audits
    from mlx_audit.cli._progress import progress
    from mlx_audit.cli._stamps import note_stale

    for request in requests:
        note_stale(request.folder, request.text)
    with progress() as listener:
        return run_audits(requests, jobs=jobs, timeout=timeout, listener=listener, ready=[child])


def _report(outcomes: list[Outcome], options: Options, json: str | None, record: bool, started: float) -> int:
    """Write what was asked for, and return the exit code."""
    from mlx_audit.audit.exit_codes import code_of, combine
    from mlx_audit.audit.planted import planted_warning
    from mlx_audit.cli import _render

    codes = [code_of(result, partial=options.partial) for outcome in outcomes for result in outcome.results]
    codes += [outcome.failed.exit_code for outcome in outcomes if outcome.failed is not None]
    code = combine(codes)
    console = _console.stderr() if json == "-" else _console.stdout()
    _render.show_outcomes(console, outcomes, partial=options.partial)
    if json is not None:
        write_json(json, outcomes)
    for outcome in outcomes:
        if outcome.failed is not None:
            _console.note(f"error: {outcome.failed.message}")
        elif options.partial and all(_is_empty(result) for result in outcome.results):
            _console.note(f"{outcome.request.text}: no check is both of these tiers and named by --only")
    if record:
        _record(outcomes)
    if warning := planted_warning():
        _console.note(warning)
    seconds = time.perf_counter() - started
    print(
        _render.summary(outcomes, code, seconds, partial=options.partial),
        file=sys.stderr if json == "-" else sys.stdout,
    )
    return code


def _is_empty(result: Result) -> bool:
    """Whether nothing was selected for it; a target that died has no checks either, but a verdict."""
    return not result.checks and result.verdict == "undecided"


def write_json(file: str, outcomes: list[Outcome]) -> None:
    from mlx_audit.evidence.environment import environment
    from mlx_audit.evidence.records import write_atomically
    from mlx_audit.evidence.results import Results

    known = next((outcome.environment for outcome in outcomes if outcome.environment is not None), None)
    results = [result for outcome in outcomes for result in outcome.results]
    text = Results(environment=known or environment(), results=results).to_json()
    if file == "-":
        print(text, end="")
        return
    try:
        write_atomically(Path(file).absolute(), text)
    except OSError as error:
        raise MlxAuditError("the results cannot be written", where=file, found=error.strerror) from error


def _record(outcomes: list[Outcome]) -> None:
    from mlx_audit.audit.recording import NotRecorded, record, record_folder

    for outcome in outcomes:
        if outcome.failed is not None:
            continue
        try:
            _console.note(f"recorded: {record(outcome, record_folder(outcome.request))}")
        except NotRecorded as reason:
            _console.note(str(reason))
