"""The exit code of an audit, in one place."""

from __future__ import annotations

from collections.abc import Iterable

from mlx_audit.evidence.results import ClaimResult, Result

HOLDS = 0
CLAIM_FAILED = 1
USAGE = 2
NOTHING = 3
UNDECIDED = 4

_POSITIVE = ("capable", "limited")


def code_of(result: Result, *, partial: bool = False) -> int:
    """Return the exit code that one result asks for.

    Args:
        result: Of one target × variant × configuration.
        partial: Only some tiers or checks were selected: these alone decide, whatever is claimed. A claim
            `undecided` moves nothing all the same, and where nothing was selected, nothing was collected.
    """
    claims = list(result.claims.values()) or [ClaimResult(claimed=None, verdict=result.verdict)]
    if partial and not result.checks and result.verdict == "undecided":
        return NOTHING
    if partial and result.checks:
        return HOLDS if _all_undecided(claims) else _of_checks(result)
    return combine(_of_claim(claim) for claim in claims)


def is_binding(result: Result) -> bool:
    """Return whether every check of a result has to pass for its claims to hold.

    Not so where the claim is `undecided`, which moves nothing, or `not-capable`, which a failed check confirms.
    """
    return not result.claims or any(c.claimed in (*_POSITIVE, None) for c in result.claims.values())


def combine(codes: Iterable[int]) -> int:
    """Return the exit code of several: 2, else 1 over 4 over 0; 3 when there is nothing."""
    found = set(codes)
    return next((code for code in (USAGE, CLAIM_FAILED, UNDECIDED, HOLDS) if code in found), NOTHING)


def _of_claim(claim: ClaimResult) -> int:
    if claim.claimed == "undecided":
        return HOLDS
    if claim.verdict == "undecided":
        return UNDECIDED
    wanted = claim.claimed in _POSITIVE if claim.claimed is not None else True
    return HOLDS if (claim.verdict in _POSITIVE) == wanted else CLAIM_FAILED


def _of_checks(result: Result) -> int:
    statuses = {check.status for check in result.checks}
    by_status = {"fail": CLAIM_FAILED, "not-run": UNDECIDED, "pass": HOLDS}
    return next((code for status, code in by_status.items() if status in statuses), NOTHING)


def _all_undecided(claims: Iterable[ClaimResult]) -> bool:
    return all(claim.claimed == "undecided" for claim in claims)
