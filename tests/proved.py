"""A record as a full audit would write it, for tests of what a proved family may do."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path
from typing import Any

from mlx_audit.evidence import CheckResult, Result
from mlx_audit.evidence.codes import check_tiers, needed_codes
from mlx_audit.evidence.environment import backend
from mlx_audit.evidence.records import make_record, write_record
from mlx_audit.manifests import Manifest, find_manifest


def write_proof(folder: Path, family: str | Manifest) -> Path:
    """Write a record below `folder` that says of a family's variant `full` what a green audit says; return `folder`."""
    manifest = find_manifest(family) if isinstance(family, str) else family
    assert manifest is not None
    tiers: dict[str, Any] = check_tiers()
    checks = [CheckResult(code=code, name="name", tier=tiers[code], status="pass") for code in needed_codes()]
    result = Result(
        target=manifest.family,
        family=manifest.family,
        variant="full",
        configuration="tiny",
        verdict="capable",
        checks=sorted(checks, key=lambda check: check.code),
    )
    write_record(make_record(manifest, [result], backend(), version("mlx")), folder)
    return folder
