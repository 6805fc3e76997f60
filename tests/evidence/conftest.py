"""A record of qwen2 as a full run would write it."""

from __future__ import annotations

from importlib.metadata import version

import pytest

from mlx_audit.evidence import CheckResult, Result
from mlx_audit.evidence.codes import check_tiers, needed_codes
from mlx_audit.evidence.digests import ordered, ordered_toolkit, total
from mlx_audit.evidence.environment import backend
from mlx_audit.evidence.records import Record, make_record
from mlx_audit.manifests import find_manifest


def check(code: str = "PAR001", status: str = "pass", **values: object) -> CheckResult:
    tier = check_tiers().get(code, "numeric")
    return CheckResult.model_validate(
        {"code": code, "name": "name", "tier": tier, "status": status, **values}
    )


def result_of(
    *checks: CheckResult, variant: str = "full", configuration: str = "tiny", **values: object
) -> Result:
    return Result(
        target="qwen2",
        family="qwen2",
        variant=variant,
        configuration=configuration,
        verdict="capable",
        checks=list(checks),
        **values,
    )


def every_check(**last: object) -> list[CheckResult]:
    """Return a pass of each check that a verdict needs; `last` are further values of PAR001's."""
    return [check(code, **(last if code == "PAR001" else {})) for code in sorted(needed_codes())]


def of_other_code(record: Record, part: str, file: str = "") -> Record:
    """Return a copy of a record as it would have been made when a file of `model` or `toolkit` was another."""
    files = {name: dict(group) for name, group in record.files.items()}
    digest = "sha256:0"
    if part in files:
        files[part][file or next(iter(files[part]))] = "0" * 64
        order = ordered(record.module, files[part]) if part == "model" else ordered_toolkit(files[part])
        digest = total(order)
    return record.model_copy(update={"digests": {**record.digests, part: digest}, "files": files})


@pytest.fixture
def record() -> Record:
    checks = every_check(figures={"largest": 0.0, "text": "µ"}, where="x.py:3", reproduce="cmd")
    results = [result_of(*checks, seconds=3.5), result_of(*checks, configuration="other")]
    manifest = find_manifest("qwen2")
    assert manifest is not None
    return make_record(manifest, results, backend(), version("mlx"))
