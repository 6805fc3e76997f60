"""`mlx-audit bench`: compiled against eager decoding, in one run, as ratios."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mlx_audit.cli import _choices, _console
from mlx_audit.errors import MlxAuditError

if TYPE_CHECKING:
    from mlx_audit.audit.bench import Sizes

_MOST_BYTES, _MOST_VALUES = 16 << 20, 500_000
"""Of a file that `--from` reads."""

Model = Annotated[
    str, typer.Argument(metavar="MODEL", help="A checkpoint, tiny, or a family (random weights).")
]
Config = Annotated[Path | None, typer.Option("--config", help="The config.json of a family.")]
Fill = Annotated[str, typer.Option("--fill", help="Tokens held when a block begins; commas allowed.")]
Capacity = Annotated[str, typer.Option("--capacity", help="Declared capacities; commas allowed.")]
Blocks = Annotated[int, typer.Option("--blocks", min=2, help="Pairs of blocks at each fill and capacity.")]
Tokens = Annotated[int, typer.Option("--block-tokens", min=2, help="Tokens a block.")]
Generate = Annotated[int, typer.Option("--generate", min=0, help="Also a whole generation up to N tokens.")]
Dtype = Annotated[str, typer.Option("--dtype", help="Of random weights: float32, bfloat16 or float16.")]
Seed = Annotated[
    int, typer.Option("--seed", min=0, max=_choices.MOST_SEED, help="Of weights, tokens and cache contents.")
]
Svg = Annotated[
    Path | None, typer.Option("--svg", metavar="FILE", help="Also draw the ratios; with --ms, milliseconds.")
]
Ms = Annotated[bool, typer.Option("--ms", help="Draw milliseconds a token.")]
From = Annotated[
    list[Path] | None,
    typer.Option("--from", metavar="FILE", help="Draw what --json wrote, and measure nothing; repeatable."),
]
Json = Annotated[bool, typer.Option("--json", help="Write as JSON to stdout.")]


def bench(
    model: Model = "tiny",
    config: Config = None,
    fill: Fill = "64,260,1000,1030",
    capacity: Capacity = "1024,8192",
    blocks: Blocks = 24,
    block_tokens: Tokens = 4,
    generate: Generate = 0,
    dtype: Dtype = "float32",
    seed: Seed = 0,
    svg: Svg = None,
    ms: Ms = False,
    from_: From = None,
    json: Json = False,
) -> int:
    """Measure compiled against eager decoding: paired ratios, above 1 where compiled is faster."""
    if from_:
        if svg is None:
            raise MlxAuditError("nothing says where to draw", where="--from", fix="add --svg FILE")
        _draw(svg, [result for path in from_ for result in _stored(path)], ms=ms)
        return 0
    _choices.one_of("--dtype", dtype, _choices.DTYPES)
    fills, capacities = _numbers("--fill", fill), _numbers("--capacity", capacity)
    # What the model's code prints must not mix with the answer.
    with contextlib.redirect_stdout(sys.stderr):
        from mlx_audit.models.modules import defer_mlx_lm

        defer_mlx_lm()
        from mlx_audit.audit.bench import PROMPT, Sizes, measure
        from mlx_audit.audit.bench_chart import SCHEMA
        from mlx_audit.audit.bench_models import bench_model
        from mlx_audit.evidence.environment import environment

        if 0 < generate <= PROMPT:
            raise MlxAuditError(
                "too short", where="--generate", found=generate, allowed=f"more than {PROMPT}"
            )
        sizes = Sizes(fills, capacities, blocks, block_tokens, generate, seed)
        built = bench_model(model, config, dtype=dtype, seed=seed)
        measured = measure(built, sizes, _console.note)
    result = {
        "schema": SCHEMA,
        "environment": environment().model_dump(),
        "model": model,
        "config": str(config) if config is not None else None,
        "dtype": dtype,
        **_settings(sizes),
        **measured,
    }
    if svg is not None:
        _draw(svg, [result], ms=ms)
    if json:
        _console.print_json(result)
    else:
        _show(result)
    return 0


def _stored(path: Path) -> list[dict[str, Any]]:
    """Return the results in a file that `--json` wrote, or a list of them."""
    from mlx_audit.audit.bench_chart import SCHEMA
    from mlx_audit.manifests.files import read_json

    try:
        found = read_json(path, _MOST_BYTES, _MOST_VALUES)
    except (OSError, ValueError, RecursionError) as error:
        raise MlxAuditError("the results cannot be read", where=str(path), found=error) from error
    results = found if isinstance(found, list) else [found]
    if not all(isinstance(result, dict) and result.get("schema") == SCHEMA for result in results):
        raise MlxAuditError("these are no results of bench", where=str(path), allowed=f'"schema": "{SCHEMA}"')
    return results


def _draw(path: Path, results: Sequence[dict[str, Any]], *, ms: bool) -> None:
    from mlx_audit.audit import bench_chart
    from mlx_audit.evidence.records import write_atomically

    try:
        chart = bench_chart.milliseconds(results) if ms else bench_chart.ratios(results)
    except (KeyError, TypeError, ValueError) as error:
        raise MlxAuditError(
            "the results lack what the chart needs", where="--from", found=repr(error)
        ) from error
    write_atomically(_choices.output("--svg", path), chart.svg())


def _numbers(option: str, text: str) -> list[int]:
    words = [word.strip() for word in text.split(",")]
    if not all(word.isascii() and word.isdigit() and 0 < int(word) < 2**31 for word in words):
        raise MlxAuditError("whole numbers are needed", where=option, found=text, allowed="such as 64,1000")
    return sorted({int(word) for word in words})


def _settings(sizes: Sizes) -> dict[str, Any]:
    return {"blocks": sizes.blocks, "block_tokens": sizes.tokens, "seed": sizes.seed}


def _show(result: dict[str, Any]) -> None:
    print(
        "capacity   fill   rung   eager/compiled   95% interval      eager ms   compiled ms   trace s   tokens"
    )
    for cell in result["cells"]:
        ratio, same = cell["ratio"], "same" if cell["same_tokens"] else "DIFFER"
        print(
            f"{cell['capacity']:>8,} {cell['fill']:>6,} {cell['rung']:>6,}   {ratio['mean']:>14.3f}   "
            f"{ratio['low']:.3f} to {ratio['high']:.3f}   {cell['eager_ms']:>8.2f}   {cell['compiled_ms']:>11.2f}"
            f"   {cell['trace_seconds']:>7.2f}   {same}"
        )
    mean = result["geometric_mean"]
    print(f"geometric mean {mean['mean']:.3f}, 95% interval {mean['low']:.3f} to {mean['high']:.3f}")
    mean = result["cpu_geometric_mean"]
    print(f"of processor time {mean['mean']:.3f}, 95% interval {mean['low']:.3f} to {mean['high']:.3f}")
    for item in result["skipped"]:
        print(f"left out: {item}")
    for memory in result["memory"]:
        _show_memory(memory)
    if "generation" in result:
        whole = result["generation"]
        same = "same tokens" if whole["same_tokens"] else "TOKENS DIFFER"
        print(
            f"one generation of {whole['tokens']:,} tokens, {whole['traces']} traces included: "
            f"ratio {whole['ratio']:.3f}, {same}"
        )


def _show_memory(memory: dict[str, int]) -> None:
    from mlx_audit.cli._render import human_bytes

    more = memory["compiled_peak_bytes"] - memory["eager_peak_bytes"]
    print(
        f"peak memory, {memory['capacity']:,} declared and {memory['fill']} used: compiled {human_bytes(abs(more))} "
        f"{'above' if more >= 0 else 'below'} eager; the buffers take {human_bytes(memory['buffer_bytes'])}"
    )
