"""What a machine can decide: versions, compiler, kernel cache, and one real compilation in a child process."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from mlx_audit.audit.process import death
from mlx_audit.evidence.environment import compiler

PACKAGES = ("mlx-audit", "mlx", "mlx-lm", "numpy", "hypothesis")
"""Packages whose versions matter."""

_PROBE_SECONDS = 120.0


@dataclass
class Obstacle:
    """Something that makes a verdict impossible here, and how to mend it."""

    what: str
    fix: str


@dataclass
class Diagnosis:
    """What `doctor` reports.

    Attributes:
        versions: Of packages; None where one is not installed.
        compiler: Path of the C++ compiler that MLX's CPU backend calls, or None.
        disabled: Value of MLX_DISABLE_COMPILE, or None where it is not set.
        kernel_cache: Folder in which MLX's CPU backend keeps compiled kernels.
        kernels: Compiled kernels in it.
        probe: What the child found (see `probe`), or nothing.
        obstacles: Empty where verdicts are possible.
    """

    python: str
    platform: str
    versions: dict[str, str | None]
    compiler: str | None
    disabled: str | None
    kernel_cache: str
    kernels: int
    probe: dict[str, Any] = field(default_factory=dict)
    obstacles: list[Obstacle] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain data."""
        return asdict(self)


def diagnose() -> Diagnosis:
    """Look at this machine; takes a second or two, most of it the C++ compiler's."""
    cache = kernel_cache()
    diagnosis = Diagnosis(
        python=platform.python_version(),
        platform=f"{platform.system().lower()}-{platform.machine()}",
        versions={package: _version(package) for package in PACKAGES},
        compiler=compiler(),
        disabled=os.environ.get("MLX_DISABLE_COMPILE"),
        kernel_cache=str(cache),
        kernels=sum(1 for _ in cache.glob("lib*.so")) if cache.is_dir() else 0,
    )
    diagnosis.obstacles = _missing(diagnosis)
    if not diagnosis.obstacles:
        diagnosis.obstacles = _run_probe(diagnosis)
    return diagnosis


def kernel_cache() -> Path:
    """Return where MLX's CPU backend keeps compiled kernels: in the temporary directory, by MLX version."""
    return Path(os.environ.get("TMPDIR") or "/tmp") / "mlx" / (_version("mlx") or "unknown") / "cpu"


def temporary_folder_obstacle() -> Obstacle | None:
    """Return why nothing can be compiled in the temporary folder that is named, or None."""
    named = os.environ.get("TMPDIR")
    if not named:
        return None
    fix = "unset TMPDIR, or name a folder that can be written"
    if not Path(named).is_dir():
        return Obstacle(f"the temporary folder does not exist: {named}", fix)
    if not os.access(named, os.W_OK | os.X_OK):
        return Obstacle(f"the temporary folder cannot be written: {named}", fix)
    return None


def _missing(diagnosis: Diagnosis) -> list[Obstacle]:
    folder = temporary_folder_obstacle()
    return ([folder] if folder is not None else []) + [
        Obstacle(f"{package} is not installed", f"pip install {package}")
        for package, installed in diagnosis.versions.items()
        if installed is None
    ]


def _run_probe(diagnosis: Diagnosis) -> list[Obstacle]:
    """Compile a function in a child with an empty kernel cache, and say what stands in the way."""
    with tempfile.TemporaryDirectory(prefix="mlx-audit-") as empty:
        try:
            done = subprocess.run(
                [sys.executable, "-P", "-m", "mlx_audit.audit.probe"],
                env={**os.environ, "TMPDIR": empty},
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=_PROBE_SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return [Obstacle(f"compiling one function took more than {_PROBE_SECONDS:g} s", _fix(diagnosis))]
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        what = f"compiling one function failed: the process {death(done.returncode)}: {last}"
        return [Obstacle(what, _fix(diagnosis))]
    diagnosis.probe = json.loads(done.stdout)
    return list(_found(diagnosis))


def _found(diagnosis: Diagnosis) -> list[Obstacle]:
    traces, calls = diagnosis.probe["traces"], diagnosis.probe["calls"]
    if traces != 1:
        what = f"mx.compile does not compile: {calls} calls ran the Python body {traces} times"
        return [Obstacle(what, _fix(diagnosis))]
    if not diagnosis.probe["agrees"]:
        return [
            Obstacle("a compiled function computes something else than the same function run eagerly", "")
        ]
    return []


def _fix(diagnosis: Diagnosis) -> str:
    if diagnosis.disabled is not None:
        return "unset MLX_DISABLE_COMPILE; MLX looks only at its presence, any value counts"
    name = "g++" if platform.system() == "Linux" else "the Xcode command line tools (xcode-select --install)"
    if diagnosis.compiler is None:
        return f"install {name}; no C++ compiler is on PATH"
    return f"check that {diagnosis.compiler} compiles C++17, and that the temporary directory can be written"


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
