"""`mlx-audit convert`: a checkpoint as an MLX folder, audited with its own weights, and stamped."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Annotated

import typer

from mlx_audit.cli import _choices, _console, _files

if TYPE_CHECKING:
    from mlx_audit.audit.request import Options, Request
    from mlx_audit.audit.runner import Outcome
    from mlx_audit.convert.conversion import Conversion, Plan
    from mlx_audit.convert.options import ConvertOptions

_MOST_NAMED = 10

Src = Annotated[
    str,
    typer.Argument(
        metavar="SRC", help="Hugging Face or MLX folder, .gguf file, smollm2, or a Hub id (org/name)."
    ),
]
Dst = Annotated[
    str, typer.Argument(metavar="DST", help="A new folder; or SRC itself, to be stamped as it is.")
]
Quantize = Annotated[bool, typer.Option("--quantize", "-q", help="Generate a quantized model.")]
Bits = Annotated[int | None, typer.Option("--q-bits", help="Bits per weight for quantization.")]
Group = Annotated[int | None, typer.Option("--q-group-size", help="Group size for quantization.")]
Mode = Annotated[str, typer.Option("--q-mode", help="The quantization mode.")]
Predicate = Annotated[str | None, typer.Option("--quant-predicate", help="Mixed-bit quantization recipe.")]
Dequantize = Annotated[bool, typer.Option("--dequantize", "-d", help="Dequantize a quantized model.")]
Dtype = Annotated[
    str | None,
    typer.Option(
        "--dtype", help="Of what is not quantized; by default as config.json says, float32 of a GGUF."
    ),
]
Profile = Annotated[str, typer.Option("--profile", help="How much to audit: quick, ci or nightly.")]
Json = Annotated[str | None, typer.Option("--json", metavar="FILE", help="Write the results; - is stdout.")]
Timeout = Annotated[float, typer.Option("--timeout", min=0.1, help="Seconds that the audit may take.")]


def convert(
    src: Src,
    dst: Dst,
    quantize: Quantize = False,
    q_bits: Bits = None,
    q_group_size: Group = None,
    q_mode: Mode = "affine",
    quant_predicate: Predicate = None,
    dequantize: Dequantize = False,
    dtype: Dtype = None,
    profile: Profile = "quick",
    json: Json = None,
    timeout: Timeout = 600.0,
) -> int:
    """Convert a checkpoint, audit it with its own weights, and stamp it; exits as run does on the result."""
    from mlx_audit.convert.conversion import plan_conversion

    started = time.perf_counter()
    _choices.seconds("--timeout", timeout)
    _choices.require_temporary_folder()
    options = _options(
        q_mode,
        quant_predicate,
        dtype,
        quantize=quantize,
        q_bits=q_bits,
        q_group_size=q_group_size,
        dequantize=dequantize,
    )
    audit_options = _audit_options(profile)
    plan = plan_conversion(_choices.target(src), dst, options)
    if json not in (None, "-"):
        _files.results("--json", json, [plan.source.path, *plan.source.files.values()])
    return _report(_convert(plan, audit_options, timeout), json, started)


def _options(
    mode: str, predicate: str | None, dtype: str | None, **others: bool | int | None
) -> ConvertOptions:
    from typing import get_args

    from mlx_audit.convert.options import ConvertOptions, Mode, Recipe

    words = {"q_mode": _choices.one_of("--q-mode", mode, get_args(Mode))}
    if predicate is not None:
        words["quant_predicate"] = _choices.one_of("--quant-predicate", predicate, get_args(Recipe))
    if dtype is not None:
        words["dtype"] = _choices.one_of("--dtype", dtype, _choices.DTYPES)
    return ConvertOptions.model_validate({**words, **others})


def _audit_options(profile: str) -> Options:
    from mlx_audit.audit.request import Options
    from mlx_audit.checks.profiles import PROFILES

    _choices.one_of("--profile", profile, list(PROFILES))
    return Options(profile=profile)


def _convert(plan: Plan, options: Options, timeout: float) -> Conversion:
    from mlx_audit.audit.runner import run_audits
    from mlx_audit.cli._progress import progress
    from mlx_audit.cli._stamps import hashed
    from mlx_audit.convert.conversion import convert as convert_and_audit

    def audit(request: Request) -> Outcome:
        with progress() as listener:
            return run_audits([request], timeout=timeout, listener=listener)[0]

    return convert_and_audit(plan, options, audit, hashed)


def _report(made: Conversion, json: str | None, started: float) -> int:
    from mlx_audit.audit.exit_codes import code_of, combine
    from mlx_audit.cli import _render
    from mlx_audit.cli.run import write_json
    from mlx_audit.evidence.stamps import FILE

    outcome = made.outcome
    code = combine(code_of(result) for result in outcome.results)
    console = _console.stderr() if json == "-" else _console.stdout()
    _render.show_outcomes(console, [outcome], partial=False)
    if json is not None:
        write_json(json, [outcome])
    for remark in made.remarks[:_MOST_NAMED]:
        _console.note(remark)
    if len(made.remarks) > _MOST_NAMED:
        _console.note(f"and {len(made.remarks) - _MOST_NAMED} more like these")
    _console.note(f"stamped {made.stamp.verdict}: {made.folder / FILE}")
    seconds = time.perf_counter() - started
    print(
        _render.summary([outcome], code, seconds, partial=False),
        file=sys.stderr if json == "-" else sys.stdout,
    )
    return code
