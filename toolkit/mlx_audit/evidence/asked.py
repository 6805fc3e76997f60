"""What is asked of a proof today: every check that exists now, each in its own tier. What files say is held to it."""

from __future__ import annotations

from collections.abc import Sequence

from mlx_audit.evidence.codes import DECODE, check_tiers, needed_codes, rests_on
from mlx_audit.evidence.results import CheckResult
from mlx_audit.evidence.verdict import Verdict, decide


def decide_today(
    checks: Sequence[CheckResult], *, limits: Sequence[str] = (), claim: str = DECODE, where: str = "it"
) -> Verdict:
    """Return the verdict of checks that were read from a file; it is undecided where one is lacking that exists today,
    or where none of a tier passed.

    Args:
        checks: As they were read.
        limits: What the claim does not cover.
        claim: What is asked.
        where: What they are the checks of, for the reason.
    """
    verdict = decide(checks, limits=limits, claim=claim)
    if verdict.name not in ("capable", "limited"):
        return verdict
    if missing := lacking(checks, claim):
        return Verdict("undecided", f"{where} lacks {', '.join(missing)}")
    if idle := _idle_tiers(checks, claim):
        return Verdict("undecided", f"{where} has no {' or '.join(idle)} check that passed")
    return verdict


def lacking(checks: Sequence[CheckResult], claim: str = DECODE) -> list[str]:
    """Return the codes of the checks that a claim needs and that are not there, in order.

    A check in another tier is not there: those of the checkpoint tier may be left out, and none may borrow that by
    taking its name.
    """
    tiers = check_tiers()
    there = {check.code for check in checks if check.tier == tiers.get(check.code)}
    return sorted(needed_codes(claim) - there)


def _idle_tiers(checks: Sequence[CheckResult], claim: str) -> list[str]:
    """Return the tiers of which a claim has checks and none passed: not every one of them can be without application.

    What it rests on may be: without a manifest there are no rules to compare with.
    """
    tiers, needed = check_tiers(), needed_codes(claim) - rests_on(claim)
    passed = {check.tier for check in checks if check.status == "pass" and check.code in needed}
    return sorted({tiers[code] for code in needed} - passed)
