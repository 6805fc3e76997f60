"""From the outcome of an audit to the stamp of the folder that was audited."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from mlx_audit.audit.runner import Outcome
from mlx_audit.convert.order import ConversionFailed
from mlx_audit.errors import storable
from mlx_audit.evidence.file_hashes import Hashed
from mlx_audit.evidence.records import minor
from mlx_audit.evidence.results import ClaimResult, Result
from mlx_audit.evidence.stamps import Stamp, StampedCheck, StampedFile, stamp_digests

CHECK_AGAIN = "mlx-audit run ."
_MOST_CHARACTERS = 2_000
"""Of a reason."""


def make_stamp(outcome: Outcome, hashes: Mapping[str, Hashed]) -> Stamp:
    """Return the stamp of a checkpoint folder.

    Args:
        outcome: Of its audit, as a checkpoint, with all tiers.
        hashes: What its files hold, by name, before and after the audit.

    Raises:
        ConversionFailed: it could not be audited at all.
    """
    request = outcome.request
    if outcome.failed is not None:
        raise ConversionFailed(outcome.failed.message)
    result = next((r for r in outcome.results if r.configuration == request.config_name), None)
    if result is None or outcome.environment is None or request.module is None:
        raise ConversionFailed("the audit ended without a result", where=request.text)
    cleaned = _without_paths(result, Path(request.text).absolute())
    return Stamp(
        family=cleaned.family,
        module=request.module,
        variant=cleaned.variant,
        verdict=cleaned.verdict,
        reason=cleaned.reason,
        limits=cleaned.limits,
        claims=cleaned.claims,
        backend=outcome.environment.backend,
        mlx=minor(outcome.environment.mlx),
        profile=cleaned.profile,
        seed=cleaned.seed,
        digests=stamp_digests(cleaned.family, request.module, cleaned.claims),
        checks=[
            StampedCheck(code=check.code, tier=check.tier, status=check.status, reason=check.reason)
            for check in sorted(cleaned.checks, key=lambda check: check.code)
        ],
        files={name: StampedFile(bytes=found.bytes, sha256=found.sha256) for name, found in hashes.items()},
        check_again=CHECK_AGAIN,
    )


def renamed(outcome: Outcome, folder: Path, name: str) -> Outcome:
    """Return an outcome that speaks of DST where it speaks of the temporary folder that was audited."""

    def text(value: str) -> str:
        return value.replace(str(folder), name)

    def escaped(value: str) -> str:
        return json.dumps(value, ensure_ascii=False)[1:-1]

    def of(result: Result) -> Result:
        return Result.model_validate_json(
            result.model_dump_json().replace(escaped(str(folder)), escaped(name))
        )

    failed = outcome.failed
    if failed is not None:
        failed = failed.model_copy(update={"message": text(failed.message)})
    return replace(outcome, results=[of(result) for result in outcome.results], failed=failed)


def _without_paths(result: Result, folder: Path) -> Result:
    """Return the result with paths of this machine taken out of its texts."""

    def text(value: str) -> str:
        return storable(value.replace(str(folder), "."), _MOST_CHARACTERS)

    checks = [check.model_copy(update={"reason": text(check.reason)}) for check in result.checks]
    claims = {
        name: ClaimResult(claimed=claim.claimed, verdict=claim.verdict, reason=text(claim.reason))
        for name, claim in result.claims.items()
    }
    return result.model_copy(update={"checks": checks, "claims": claims, "reason": text(result.reason)})
