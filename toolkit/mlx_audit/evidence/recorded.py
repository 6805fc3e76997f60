"""A record as a results document, for those who report what is proved and did not run the audit."""

from __future__ import annotations

from collections.abc import Sequence

from mlx_audit.evidence.codes import DECODE, RESTORE
from mlx_audit.evidence.lapse import lapse_of_prefix
from mlx_audit.evidence.records import Record, RecordedResult, RecordedVariant
from mlx_audit.evidence.results import ClaimResult, Environment, Result, Results
from mlx_audit.evidence.verdict import Verdict
from mlx_audit.manifests import Manifest


def record_results(record: Record, manifest: Manifest, reasons: Sequence[str] = ()) -> Results:
    """Return what a record says, as a results document; verdicts are recomputed from its checks.

    Only what a record knows is filled in: of the environment the backend and MLX's minor version, and no times.

    Args:
        record: A loaded record.
        manifest: Of its family, as it is now; it says what is claimed today.
        reasons: Why the record no longer counts, from `staleness`. Every verdict is then `undecided`.
    """
    results = [
        _result(record, manifest, name, variant, result, reasons)
        for name, variant in record.variants.items()
        for result in variant.results
    ]
    return Results(environment=recorded_environment(record.backend, record.mlx), results=results)


def recorded_environment(backend: str, mlx: str) -> Environment:
    """Return an environment as far as records know it: all else is empty.

    Args:
        backend: Of the record.
        mlx: Its minor version.
    """
    return Environment(
        mlx_audit="", mlx=mlx, mlx_lm="", python="", platform="", backend=backend, compiler=None
    )


def _result(
    record: Record,
    manifest: Manifest,
    name: str,
    variant: RecordedVariant,
    result: RecordedResult,
    reasons: Sequence[str],
) -> Result:
    declared = manifest.variants.get(name)
    verdict = _verdict(record, variant, result, DECODE, reasons)
    claimed = None if declared is None else declared.claims.compiled_decode
    claims = {DECODE: ClaimResult(claimed=claimed, verdict=verdict.name, reason=verdict.reason)}
    restore = None if declared is None else declared.claims.prefix_restore
    if restore is not None or variant.speaks_of(RESTORE):
        found = _verdict(record, variant, result, RESTORE, reasons)
        claims[RESTORE] = ClaimResult(claimed=restore, verdict=found.name, reason=found.reason)
    return Result(
        target=record.family,
        family=record.family,
        variant=name,
        configuration=result.configuration,
        verdict=verdict.name,
        reason=verdict.reason,
        limits=variant.limits,
        claims=claims,
        checks=[check.model_copy(deep=True) for check in result.checks],
        digests=record.digests,
        seed=variant.seed,
        profile=variant.profile,
        faults=variant.faults,
    )


def _verdict(
    record: Record, variant: RecordedVariant, result: RecordedResult, claim: str, reasons: Sequence[str]
) -> Verdict:
    """Return what a record says of a claim, unless the record no longer counts for it."""
    if claim == RESTORE and not variant.speaks_of(RESTORE):
        return Verdict("undecided", "the record has no check of restored prefixes")
    more = lapse_of_prefix(record).reasons if claim == RESTORE else []
    if reasons or more:
        return Verdict("undecided", f"stale: {'; '.join([*reasons, *more])}")
    return variant.verdict_of(result, claim)
