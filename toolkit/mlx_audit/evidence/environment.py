"""Where a result is made: versions, platform, backend, compiler."""

from __future__ import annotations

import platform
import shutil
import sys
from importlib.metadata import version

from mlx_audit.evidence.results import Environment


def backend() -> str:
    """Return `cpu`, `metal` or `cuda`: what MLX computes on by default in this process."""
    import mlx.core as mx

    if mx.default_device().type == mx.DeviceType.cpu:
        return "cpu"
    return "metal" if mx.metal.is_available() else "cuda"


def compiler() -> str | None:
    """Return the path of the C++ compiler that MLX's CPU backend calls, or None."""
    return shutil.which("g++" if sys.platform == "linux" else "clang++") or shutil.which("g++")


def environment() -> Environment:
    """Return the facts of this process."""
    return Environment(
        mlx_audit=version("mlx-audit"),
        mlx=version("mlx"),
        mlx_lm=version("mlx-lm"),
        python=platform.python_version(),
        platform=f"{platform.system().lower()}-{platform.machine()}",
        backend=backend(),
        compiler=compiler(),
    )
