"""`--repro FILE`: the script of a failure is written, run once, and what it shows is said."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mlx_audit.cli import _console
from mlx_audit.errors import MlxAuditError, clean

if TYPE_CHECKING:
    from mlx_audit.audit.runner import Outcome

_TIMEOUT_SECONDS = 120


def write(outcomes: Sequence[Outcome], file: Path) -> None:
    """Write the first script that there is to a file, run it, and say on stderr what came of it."""
    made = [outcome.reproduced for outcome in outcomes if outcome.reproduced is not None]
    for found in made:
        if found.script:
            _write(file, found.script)
            _console.note(f"{file} reproduces {found.code}: {_shown(file, found.meaning)}")
            return
    if made:
        _console.note(f"--repro wrote nothing for {made[0].code}: {made[0].meaning}")
    elif any(check.status == "fail" for o in outcomes for result in o.results for check in result.checks):
        _console.note("--repro wrote nothing: the process died before it could make the failure smaller")
    else:
        _console.note("--repro wrote nothing: no check failed")


def _write(file: Path, script: str) -> None:
    try:
        file.write_text(script, encoding="utf-8")
    except OSError as error:
        raise MlxAuditError("the script cannot be written", where=str(file), found=error.strerror) from error


def _shown(file: Path, meaning: str) -> str:
    """Run the script as its readers do, and return what it shows in words."""
    try:
        done = subprocess.run(
            [sys.executable, "-P", str(file)],
            env={**os.environ, "HF_HUB_OFFLINE": "1"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_TIMEOUT_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"it ran for more than {_TIMEOUT_SECONDS} s and was stopped"
    last = clean((done.stdout.strip().splitlines() or [""])[-1])
    if done.returncode == 1 and last.startswith("DIFFERENT"):
        return f"it prints {last!r}"
    if done.returncode == 0 and last == "equal":
        return f"it shows no difference, so {meaning}"
    error = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
    return f"it does not run: {clean(error)}"
