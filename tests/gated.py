"""A scratch copy of mlx-lm's models that digests are taken of, and a family of one's own with a record."""

from __future__ import annotations

import os
import shutil
from importlib.metadata import version
from pathlib import Path

import yaml

from mlx_audit.evidence import CheckResult, Result
from mlx_audit.evidence.codes import DECODE, check_tiers, claim_of
from mlx_audit.evidence.digests import mlx_lm_models
from mlx_audit.evidence.environment import backend
from mlx_audit.evidence.records import make_record, write_record
from mlx_audit.manifests import load_manifest
from model_files import FORWARD, write_manifest, write_model


def copy_of_mlx_lm(folder: Path) -> Path:
    """Copy mlx-lm's sources below `folder`, to be put before the installed ones, and return its `models`."""
    shutil.copytree(mlx_lm_models().parent, folder / "mlx_lm", ignore=shutil.ignore_patterns("__pycache__"))
    return folder / "mlx_lm" / "models"


def edit(path: Path, old: str, new: str) -> None:
    """Replace a text in a file, which gets a new time of change."""
    text = path.read_text(encoding="utf-8")
    assert old in text
    before = path.stat().st_mtime_ns
    path.write_text(text.replace(old, new, 1), encoding="utf-8")
    os.utime(path, ns=(before, before + 1_000_000))


HOST_READ = (
    FORWARD,
    f"        if cache is not None and int(cache[0].offset) < 0:\n            inputs = inputs + 1\n{FORWARD}",
)
"""A change of the model that reads the position on the host: no such model can be compiled, and its audit is short."""


def own_family(folder: Path, *changes: tuple[str, str], name: str = "mine", claim: str = "capable") -> Path:
    """Write a family with one RoPE kind, and a record that says of it what a green audit says; return its manifest."""
    write_model(folder, name, *changes)
    path = write_manifest(folder, name)
    stated = yaml.safe_load(path.read_text(encoding="utf-8"))
    stated["variants"]["full"]["claims"] = {"compiled_decode": claim}
    path.write_text(yaml.safe_dump({**stated, "rope": ["default"]}), encoding="utf-8")
    manifest = load_manifest(path)
    checks = [
        CheckResult(code=code, name="name", tier=tier, status="pass")
        for code, tier in sorted(check_tiers().items())
        if claim_of(code) == DECODE
    ]
    result = Result(
        target=name, family=name, variant="full", configuration="tiny", verdict="capable", checks=checks
    )
    write_record(make_record(manifest, [result], backend(), version("mlx")), folder / "records")
    return path
