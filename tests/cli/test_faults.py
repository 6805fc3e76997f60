"""`mlx-audit faults`: every planted fault is seen by the check that is named for it, and one that is not is told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from command import mlx_audit
from mlx_audit.faults import FAULTS
from mlx_audit.faults.topologies import TOPOLOGIES

REGISTERED = """
import os
from mlx_audit.faults.base import fault

@fault("PAR001", needs="linear")
def harmless(patch):
    "A patch that changes nothing."

@fault("CAP002", needs="linear")
def deadly(patch):
    "The process ends as soon as a session is made."
    from mlx_audit.decode import CompiledDecodeSession
    patch.setattr(CompiledDecodeSession, "__init__", lambda *a, **k: os.abort())
"""
"""Two faults that only these tests have, put into every process by Python's own start-up hook."""


@pytest.fixture
def hooked(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "sitecustomize.py").write_text(REGISTERED, encoding="utf-8")
    return {"PYTHONPATH": str(tmp_path)}


def test_every_fault_once_in_its_most_exposed_topology(tmp_path: Path) -> None:
    done = mlx_audit("faults", "--all", "--profile", "quick", "--json", tmp_path / "matrix.json")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr
    matrix: dict[str, Any] = json.loads((tmp_path / "matrix.json").read_text(encoding="utf-8"))
    assert matrix["schema"] == "mlx-audit/faults/1"
    fates = {row["fault"]: [place["fate"] for place in row["planted"]] for row in matrix["faults"]}
    assert fates == {name: ["killed"] for name in FAULTS}
    assert (matrix["unhealthy"], matrix["failed"]) == ({}, [])
    used = {place["topology"] for row in matrix["faults"] for place in row["planted"]}
    assert {"linear", "rotating", "keeping", "chunked", "quantized", "arrays", "composite"} <= used
    assert used <= {topology.name for topology in TOPOLOGIES}
    assert f"{len(FAULTS)} killed by the check that is named for them, 0 survived" in done.stdout


def test_what_no_check_sees_fails(hooked: dict[str, str]) -> None:
    done = mlx_audit("faults", "llama", "--only", "harmless,frozen_write", env=hooked)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "✕ harmless in llama full: PAR001 says pass; no check that was run sees it" in done.stdout
    assert "frozen_write" in done.stdout


def test_a_fault_that_ends_the_process_is_seen_and_the_others_go_on(hooked: dict[str, str]) -> None:
    names = "deadly,frozen_write,write_one_late"
    done = mlx_audit("faults", "qwen2", "--profile", "quick", "--only", names, "--json", "-", env=hooked)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = {row["fault"]: row["planted"][0] for row in json.loads(done.stdout)["faults"]}
    assert {name: place["fate"] for name, place in rows.items()} == dict.fromkeys(names.split(","), "killed")
    assert "SIGABRT" in rows["deadly"]["reason"]


def test_faults_of_a_model_that_fails_anyway_prove_nothing(tmp_path: Path) -> None:
    """Nothing is claimed of a check that fails on the healthy model too."""
    model = tmp_path / "wrong.py"
    model.write_text(
        "from mlx_lm.models.llama import *\n"
        "from mlx_lm.models import llama\n\n"
        "class Model(llama.Model):\n"
        "    calls = 0\n\n"
        "    def __call__(self, *arguments, **options):\n"
        "        Model.calls += 1\n"
        "        return super().__call__(*arguments, **options) * (1 + Model.calls % 2)\n",
        encoding="utf-8",
    )
    config = tmp_path / "config.json"
    config.write_text(json.dumps(dict(TOPOLOGIES[3].config)), encoding="utf-8")
    done = mlx_audit("faults", model, "--config", config, "--profile", "quick", "--only", "toggle")
    assert done.returncode == 4, done.stdout + done.stderr
    assert "healthy, and yet TRC001 not as expected" in done.stdout


def test_the_list_plants_nothing() -> None:
    done = mlx_audit("faults", "--list", "--only", "frozen_write,toggle")
    assert done.returncode == 0
    assert done.stdout.splitlines()[0].startswith("frozen_write  TRC004  Every token goes into one slot")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((), "no target"),
        (("--all", "--only", "frozen_wriet"), "frozen_write"),
        (("--all", "--profile", "slow"), "quick, ci, nightly"),
        (("no_such_family",), "no_such_family"),
        (("--all", "--record"), "name the families"),
        (("qwen2", "--record", "--only", "frozen_write"), "without --only and --config"),
    ],
)
def test_usage_errors(arguments: tuple[str, ...], text: str) -> None:
    done = mlx_audit("faults", *arguments)
    assert done.returncode == 2, done.stdout
    assert text in done.stderr


def test_a_fault_of_the_environment_does_not_mix_in() -> None:
    done = mlx_audit("faults", "llama", "--only", "toggle", env={"MLX_AUDIT_PLANT": "frozen_write"})
    assert done.returncode == 2
    assert "MLX_AUDIT_PLANT" in done.stderr


@pytest.mark.nightly
def test_every_fault_in_every_topology() -> None:
    done = mlx_audit("faults", "--all")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr
