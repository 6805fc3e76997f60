"""The exit code of an audit, in one place."""

from __future__ import annotations

from collections.abc import Iterable

from mlx_audit.evidence.codes import DECODE, claims_on, own_checks
from mlx_audit.evidence.results import CheckResult, ClaimResult, Result

HOLDS = 0
CLAIM_FAILED = 1
USAGE = 2
NOTHING = 3
UNDECIDED = 4

_POSITIVE = ("capable", "limited")


def code_of(result: Result, *, partial: bool = False) -> int:
    """Return the exit code that one result asks for: that of the worst of its claims.

    Args:
        result: Of one target × variant × configuration.
        partial: Only some tiers or checks were selected: these alone decide, whatever is claimed. A claim
            `undecided` moves nothing all the same, and where nothing was selected, nothing was collected.
    """
    claims = result.claims or {DECODE: ClaimResult(claimed=None, verdict=result.verdict)}
    if partial and not result.checks and result.verdict == "undecided":
        return NOTHING
    return combine(code_of_claim(result, name, claim, partial=partial) for name, claim in claims.items())


def code_of_claim(result: Result, name: str, claim: ClaimResult, *, partial: bool = False) -> int:
    """Return the exit code that one claim of a result asks for.

    Args:
        result: Whose claim it is.
        name: Of the claim.
        claim: What is claimed, and what was found.
        partial: See `code_of`; then the claim's own checks decide.
    """
    if claim.claimed == "undecided":
        return HOLDS
    if partial and result.checks:
        return _of_checks(own_checks(result.checks, name))
    if claim.verdict == "undecided":
        return UNDECIDED
    wanted = claim.claimed in _POSITIVE if claim.claimed is not None else True
    return HOLDS if (claim.verdict in _POSITIVE) == wanted else CLAIM_FAILED


def is_binding(result: Result, code: str) -> bool:
    """Return whether a check of a result has to pass for its claims to hold.

    Not so where the claim is `undecided`, which moves nothing, or `not-capable`, which a failed check confirms.
    """
    found = [result.claims[name].claimed for name in claims_on(code) if name in result.claims]
    return not found or any(claimed in (*_POSITIVE, None) for claimed in found)


def combine(codes: Iterable[int]) -> int:
    """Return the exit code of several: 2, else 1 over 4 over 0; 3 when there is nothing."""
    found = set(codes)
    return next((code for code in (USAGE, CLAIM_FAILED, UNDECIDED, HOLDS) if code in found), NOTHING)


def _of_checks(checks: Iterable[CheckResult]) -> int:
    statuses = {check.status for check in checks}
    by_status = {"fail": CLAIM_FAILED, "not-run": UNDECIDED, "pass": HOLDS}
    return next((code for status, code in by_status.items() if status in statuses), NOTHING)
