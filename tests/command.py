"""The command line as users run it, in a process of its own, and one audit that many tests look at."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from mlx_audit.evidence.results import Result, Results

COMMAND = (sys.executable, "-P", "-m", "mlx_audit")


def environment(changes: Mapping[str, str | None] | None = None) -> dict[str, str]:
    """Return this process's environment with changes; None takes a variable away."""
    merged = {**os.environ, **(changes or {})}
    return {name: value for name, value in merged.items() if value is not None}


def mlx_audit(
    *arguments: str | Path, env: Mapping[str, str | None] | None = None, cwd: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Run the command line to its end."""
    return subprocess.run(
        [*COMMAND, *map(str, arguments)],
        env=environment(env),
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def results_of(
    *arguments: str | Path, env: Mapping[str, str | None] | None = None
) -> tuple[int, list[Result]]:
    """Run `run … --json -` and return its exit code and results."""
    done = mlx_audit("run", *arguments, "--json", "-", env=env)
    assert done.stdout, done.stderr
    return done.returncode, Results.model_validate_json(done.stdout).results


@dataclass(frozen=True)
class SharedRun:
    """What `run qwen2 llama --json FILE` gave."""

    done: subprocess.CompletedProcess[str]
    results: Results

    def result(self, family: str, variant: str, configuration: str) -> Result:
        """Return one result by its names."""
        names = (family, variant, configuration)
        return next(r for r in self.results.results if (r.family, r.variant, r.configuration) == names)


@functools.cache
def shared_run() -> SharedRun:
    """Return one real audit of both families; made once a process."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "out.json"
        done = mlx_audit("run", "qwen2", "llama", "--json", file)
        assert file.is_file(), done.stderr
        return SharedRun(done, Results.model_validate_json(file.read_text(encoding="utf-8")))
