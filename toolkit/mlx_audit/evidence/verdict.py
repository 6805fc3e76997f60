"""The verdict rule, in one place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from mlx_audit.evidence.results import CheckResult, VerdictName


class Verdict(NamedTuple):
    """A verdict and the one line that says what decided it."""

    name: VerdictName
    reason: str


def decide(checks: Sequence[CheckResult], *, limits: Sequence[str] = (), partial: bool = False) -> Verdict:
    """Return the verdict that follows from the checks.

    Any `fail` means `not-capable`. Otherwise a needed check that was not run means `undecided`; needed is every
    applicable check but those of the checkpoint tier. Otherwise `capable`, or `limited` where limits are named.

    Args:
        checks: Results on one subject.
        limits: What the manifest says the claim does not cover.
        partial: Only some checks were selected, so nothing can be proved; a failure is still a failure.
    """
    for check in checks:
        if check.status == "fail":
            return Verdict("not-capable", f"{check.code} {check.name}: {check.reason}")
    if partial:
        return Verdict("undecided", "partial: only some tiers or checks were selected")
    needed = [check for check in checks if check.tier != "checkpoint" and check.status != "not-applicable"]
    for check in needed:
        if check.status == "not-run":
            return Verdict("undecided", f"{check.code} was not run: {check.reason}")
    if not needed:
        return Verdict("undecided", "no check was run")
    if limits:
        return Verdict("limited", "; ".join(limits))
    return Verdict("capable", f"{sum(check.status == 'pass' for check in checks)} checks passed")
