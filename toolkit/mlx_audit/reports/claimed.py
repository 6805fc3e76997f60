"""Rows of a report: one claim of a variant over all configurations that it is made of."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from mlx_audit.audit.exit_codes import is_binding
from mlx_audit.evidence.codes import claims_on, own_checks
from mlx_audit.evidence.records import combine
from mlx_audit.evidence.results import CheckResult, ClaimResult, Result, VerdictName
from mlx_audit.evidence.verdict import Verdict
from mlx_audit.reports.documents import STANDINGS, Document, Standing, claims_of, standing_of, worst

_RESTS = re.compile(r"needs [A-Z]{3}\d{3}, which ")
"""How the reason of a check begins that was not run because of another one."""


@dataclass
class Row:
    """One claim of a variant in one environment.

    Attributes:
        label: Of the document.
        claim: What is claimed: `compiled_decode`, `prefix_restore`.
        parts: The results that it is made of, each with what was found of this claim; none is added once it was judged.
    """

    label: str
    family: str
    variant: str
    claim: str
    claimed: VerdictName | None
    parts: list[tuple[Result, ClaimResult]] = field(default_factory=list)

    @cached_property
    def standing(self) -> Standing:
        """The worst of its configurations."""
        return worst(standing_of(*part, self.claim) for part in self.parts)

    @cached_property
    def verdict(self) -> Verdict:
        """The weakest of its configurations."""
        return combine(Verdict(claim.verdict, claim.reason) for _, claim in self.parts)


@dataclass(frozen=True)
class Found:
    """What one check found wrong, with all configurations that it is wrong on."""

    check: CheckResult
    results: Sequence[Result]


def rows_of(documents: Iterable[Document]) -> list[Row]:
    """Return the rows of all documents, the worst first, otherwise in the order given."""
    rows: dict[tuple[str | None, ...], Row] = {}
    for document in documents:
        for result in document.results:
            for name, claim in claims_of(result).items():
                key = (document.label, result.family, result.variant, name, claim.claimed)
                row = Row(document.label, result.family, result.variant, name, claim.claimed)
                rows.setdefault(key, row).parts.append((result, claim))
    return sorted(rows.values(), key=lambda row: STANDINGS.index(row.standing))


def wrong_checks(row: Row) -> list[Found]:
    """Return the checks that a row fails by, or that leave it undecided; each reason once."""
    status = "fail" if row.standing == "fails" else "not-run"
    wrong = [
        (result, check)
        for result, claim in row.parts
        if standing_of(result, claim, row.claim) == row.standing
        for check in result.checks
        if row.claim in claims_on(check.code) and is_binding(result, check.code)
        if check.status == status and not _RESTS.match(check.reason)
    ]
    # A published configuration repeats what a tiny one found.
    own = [(result, check) for result, check in wrong if "on" not in check.figures]
    return list(_grouped(own or wrong))


def deciding_check(row: Row) -> str | None:
    """Return the code of the failed check that decided a row's verdict, or None where no failed check did."""
    if row.verdict.name != "not-capable":
        return None
    own = (check for result, _ in row.parts for check in own_checks(result.checks, row.claim))
    return next((check.code for check in own if check.status == "fail"), None)


def _grouped(wrong: Iterable[tuple[Result, CheckResult]]) -> Iterator[Found]:
    groups: dict[tuple[str | None, ...], tuple[CheckResult, list[Result]]] = {}
    for result, check in wrong:
        key = (check.code, check.reason, check.where)
        groups.setdefault(key, (check, []))[1].append(result)
    return (Found(*group) for group in groups.values())
