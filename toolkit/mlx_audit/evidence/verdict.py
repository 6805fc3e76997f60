"""The verdict rule, in one place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from mlx_audit.evidence.codes import DECODE, own_checks, rests_on
from mlx_audit.evidence.results import CheckResult, VerdictName


class Verdict(NamedTuple):
    """A verdict and the one line that says what decided it."""

    name: VerdictName
    reason: str


def decide(
    checks: Sequence[CheckResult],
    *,
    limits: Sequence[str] = (),
    partial: bool = False,
    claim: str = DECODE,
) -> Verdict:
    """Return the verdict on a claim that follows from the checks; those of other claims decide nothing of it.

    Any `fail` of its own means `not-capable`. Otherwise a needed check that was not run means `undecided`; needed is
    every applicable check but those of the checkpoint tier, and what the claim rests on must have passed, too.
    Otherwise `capable`, or `limited` where limits are named.

    Args:
        checks: Results on one subject.
        limits: What the manifest says that compiled decoding does not cover; other claims have none.
        partial: Only some checks were selected, so nothing can be proved; a failure is still a failure.
        claim: What is asked.
    """
    own = own_checks(checks, claim)
    for check in own:
        if check.status == "fail":
            return Verdict("not-capable", f"{check.code} {check.name}: {check.reason}")
    if partial:
        return Verdict("undecided", "partial: only some tiers or checks were selected")
    needed = [check for check in own if check.tier != "checkpoint" and check.status != "not-applicable"]
    for check in needed:
        if check.status == "not-run":
            return Verdict("undecided", f"{check.code} was not run: {check.reason}")
    if not needed:
        return Verdict("undecided", "no check was run")
    for check in checks:
        if check.code in rests_on(claim) and check.status in ("fail", "not-run"):
            how = "failed" if check.status == "fail" else "was not run"
            return Verdict("undecided", f"it rests on {check.code}, which {how}: {check.reason}")
    if limits and claim == DECODE:
        return Verdict("limited", "; ".join(limits))
    return Verdict("capable", f"{sum(check.status == 'pass' for check in own)} checks passed")
