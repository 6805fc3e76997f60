"""`mlx-audit doctor`: can this machine decide anything?"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from mlx_audit.cli import _console

if TYPE_CHECKING:
    from mlx_audit.audit.diagnosis import Diagnosis

Json = Annotated[bool, typer.Option("--json", help="Write everything as JSON to stdout.")]

CANNOT_DECIDE = 4


def doctor(json: Json = False) -> int:
    """Compile one function, count its traces, and say why a verdict would be impossible here: exit 0 or 4."""
    from mlx_audit.audit.diagnosis import diagnose

    diagnosis = diagnose()
    if json:
        _console.print_json(diagnosis.to_dict())
    else:
        _show(diagnosis)
    return CANNOT_DECIDE if diagnosis.obstacles else 0


def _show(diagnosis: Diagnosis) -> None:
    from rich.text import Text

    console = _console.stdout()
    rows = {
        "python": f"{diagnosis.python} on {diagnosis.platform}",
        **{package: found or "not installed" for package, found in diagnosis.versions.items()},
        "compiler": diagnosis.compiler or "none on PATH",
        "MLX_DISABLE_COMPILE": "not set" if diagnosis.disabled is None else f"set to {diagnosis.disabled!r}",
        "kernel cache": f"{diagnosis.kernel_cache} ({diagnosis.kernels} kernels)",
    }
    if probe := diagnosis.probe:
        rows["device"] = probe["device"]
        rows["probe"] = f"{probe['traces']} trace in {probe['calls']} calls, {probe['seconds']:.2f} s"
        if probe["traces"] != 1:
            rows["probe"] = rows["probe"].replace("trace ", "traces ")
    for name, value in rows.items():
        console.print(Text.assemble((f"{name:<20} ", "dim"), value))
    for obstacle in diagnosis.obstacles:
        console.print(Text(f"✕ {obstacle.what}", "red"))
        if obstacle.fix:
            console.print(Text(f"  fix: {obstacle.fix}"))
    verdict = (
        ("no verdict is possible here", "red")
        if diagnosis.obstacles
        else ("● verdicts are possible", "green")
    )
    console.print(Text(*verdict))
