"""A fault planted by the environment is never recorded, and no run with one is silent about it."""

from __future__ import annotations

from pathlib import Path

import pytest

from command import mlx_audit
from mlx_audit.audit.planted import PLANT
from mlx_audit.audit.recording import NotRecorded, record
from mlx_audit.audit.request import Options, Request
from mlx_audit.audit.runner import Outcome
from mlx_audit.models.target import resolve_target


def test_record_is_refused_before_any_work(tmp_path: Path) -> None:
    done = mlx_audit(
        "run", "qwen2", "--record", env={PLANT: "write_one_late", "MLX_AUDIT_RECORDS": str(tmp_path)}
    )
    assert done.returncode == 2
    assert done.stdout == ""
    assert "MLX_AUDIT_PLANT: no record can be made: a fault is planted; found: write_one_late" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_no_outcome_is_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PLANT, "write_one_late")
    outcome = Outcome(Request.of(resolve_target("qwen2"), Options()), [], None, [], None)
    with pytest.raises(NotRecorded, match="a fault is planted"):
        record(outcome, tmp_path)


def test_every_run_says_so() -> None:
    done = mlx_audit("run", "qwen2", "--only", "TOP003", env={PLANT: "nonesuch"})
    assert done.returncode == 2
    assert "MLX_AUDIT_PLANT: there is no such fault; found: nonesuch" in done.stderr
    assert "A FAULT IS PLANTED: MLX_AUDIT_PLANT=nonesuch" in done.stderr
