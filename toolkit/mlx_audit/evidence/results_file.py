"""Reading the document that `--json` writes: a file of anybody's."""

from __future__ import annotations

from pathlib import Path

from pydantic import ValidationError

from mlx_audit.errors import MlxAuditError
from mlx_audit.evidence.asked import decide_today
from mlx_audit.evidence.codes import DECODE
from mlx_audit.evidence.results import SCHEMA, Result, Results
from mlx_audit.manifests.files import read_json

_MOST_BYTES = 64 << 20
_MOST_VALUES = 4_000_000
_FIX = "mlx-audit run FAMILY --json FILE writes one"


class ResultsError(MlxAuditError):
    """A results file is damaged, too large, or of another format version."""


def load_results(path: Path) -> Results:
    """Read a results file and check its form, and that each verdict follows from the checks beside it.

    Raises:
        ResultsError: no readable file, more than 64 MiB, no JSON, not of this schema, or it contradicts itself.
    """
    try:
        if not path.is_file():
            raise ResultsError("there is no such results file", where=str(path), fix=_FIX)
        if (size := path.stat().st_size) > _MOST_BYTES:
            raise ResultsError(
                "the results file is too large", where=str(path), found=size, allowed=f"{_MOST_BYTES} bytes"
            )
        data = read_json(path, _MOST_BYTES, _MOST_VALUES)
    except (OSError, ValueError, RecursionError) as error:
        raise ResultsError(
            "the results file cannot be read", where=str(path), found=error, fix=_FIX
        ) from error
    found = data.get("schema") if isinstance(data, dict) else type(data).__name__
    if found != SCHEMA:
        raise ResultsError("another format", where=str(path), found=found, allowed=SCHEMA, fix=_FIX)
    try:
        results = Results.model_validate(data)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise ResultsError(
            "the results file does not have the form of its schema",
            where=f"{path}: {place}",
            found=first["msg"],
            fix=_FIX,
        ) from error
    for number, result in enumerate(results.results):
        _require_consistent(result, f"{path}: results.{number}")
    return results


def _require_consistent(result: Result, where: str) -> None:
    """Refuse a verdict that its own checks do not bear out: a report would repeat it."""
    claimed = {"verdict": (DECODE, result.verdict)}
    claimed |= {f"claims.{claim}.verdict": (claim, found.verdict) for claim, found in result.claims.items()}
    for name, (claim, verdict) in claimed.items():
        follows = decide_today(result.checks, limits=result.limits, claim=claim)
        # A target that could not be loaded is not capable without any check.
        is_decided = verdict != "undecided" and (bool(result.checks) or verdict != "not-capable")
        if is_decided and verdict != follows.name:
            raise ResultsError(
                "the verdict does not follow from the checks",
                where=f"{where}.{name}",
                found=verdict,
                allowed=f"{follows.name} ({follows.reason})",
                fix=_FIX,
            )
