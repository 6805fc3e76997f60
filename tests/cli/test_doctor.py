"""`mlx-audit doctor`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from command import mlx_audit
from mlx_audit.audit import diagnosis
from mlx_audit.audit.diagnosis import Obstacle, diagnose


def test_a_healthy_machine() -> None:
    done = mlx_audit("doctor", "--json", env={"MLX_DISABLE_COMPILE": None})
    assert done.returncode == 0, done.stdout
    found = json.loads(done.stdout)
    assert found["obstacles"] == []
    assert (found["probe"]["traces"], found["probe"]["calls"]) == (1, 8)
    assert found["versions"]["mlx"]
    assert found["kernel_cache"].endswith("cpu")


def test_compilation_switched_off() -> None:
    done = mlx_audit("doctor", env={"MLX_DISABLE_COMPILE": "0"})
    assert done.returncode == 4
    assert "✕ mx.compile does not compile: 8 calls ran the Python body 8 times" in done.stdout
    assert "fix: unset MLX_DISABLE_COMPILE" in done.stdout
    assert done.stdout.splitlines()[-1] == "no verdict is possible here"


@pytest.mark.skipif(
    sys.platform != "linux", reason="on macOS the default backend is Metal, which needs no compiler"
)
def test_no_compiler_although_kernels_are_cached(tmp_path: Path) -> None:
    done = mlx_audit("doctor", env={"PATH": str(tmp_path), "MLX_DISABLE_COMPILE": None})
    assert done.returncode == 4
    assert "none on PATH" in done.stdout
    assert "fix: install g++" in done.stdout


@pytest.mark.skipif(
    sys.platform != "linux", reason="on macOS the default backend is Metal, which needs no compiler"
)
def test_a_compiler_that_does_not_work(tmp_path: Path) -> None:
    broken = tmp_path / "g++"
    broken.write_text(
        '#!/bin/sh\nif [ "$1" = --version ]; then exit 0; fi\necho no >&2\nexit 1\n', encoding="utf-8"
    )
    broken.chmod(0o755)
    done = mlx_audit("doctor", env={"PATH": f"{tmp_path}:/bin:/usr/bin", "MLX_DISABLE_COMPILE": None})
    assert done.returncode == 4
    assert f"check that {broken} compiles C++17" in done.stdout


def test_a_package_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diagnosis, "PACKAGES", ("mlx", "no-such-package-here"))
    assert diagnose().obstacles == [
        Obstacle("no-such-package-here is not installed", "pip install no-such-package-here")
    ]
