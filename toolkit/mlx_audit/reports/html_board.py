"""What the HTML page says first: one line for each family, variant, claim and environment."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import isfinite
from typing import Any

from mlx_audit.errors import clean
from mlx_audit.evidence.results import CheckResult, Result, Results, VerdictName
from mlx_audit.reports.claimed import Row, rows_of
from mlx_audit.reports.documents import Document, Standing, gathered

MOST_NAME = 200
"""Characters of a name that the page shows."""

STRONGEST_FIRST: tuple[VerdictName, ...] = ("capable", "limited", "undecided", "not-capable")
_PROVES_NOTHING = ("not-capable", "undecided")
_MOST_NAMED = 3


@dataclass
class Block:
    """One variant in one environment.

    Attributes:
        place: Index of the environment.
        rows: One for each claim, those that claim something first.
    """

    family: str
    variant: str
    place: int
    results: list[Result] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)


@dataclass(frozen=True)
class Line:
    """One line of the board; every text is fit to be shown.

    Attributes:
        only: Which of the variant's configurations it speaks of, where not of all.
        claimed: What the manifest says, or an empty text.
        code: Of the check that decided, if one did.
        why: Its reason, or the limits, or how many checks passed.
        exactness: What the largest relative difference of logits was, or an empty text.
        exactness_class: The class that was asked for.
        kills: Planted faults that were seen, of those that could be; an empty text where none was planted.
        survived: Planted faults that were not seen.
        also: Further texts to find it by.
    """

    family: str
    variant: str
    only: str
    claim: str
    backend: str
    label: str
    verdict: VerdictName
    claimed: str
    standing: Standing
    code: str
    why: str
    exactness: str
    exactness_class: str
    kills: str
    survived: int
    also: str

    def why_parts(self) -> list[tuple[bool, str]]:
        """Return the reason in pieces, each with whether it stood between backquotes, and so is code."""
        pieces = self.why.split("`")
        if len(pieces) % 2 == 0:  # one is left open
            return [(False, self.why)]
        return [(bool(at % 2), piece) for at, piece in enumerate(pieces) if piece]


def places_and_blocks(documents: Sequence[Results]) -> tuple[list[Document], list[Block]]:
    """Return the distinct environments, and the results by family, variant and environment, in that order."""
    places = gathered(documents)
    blocks: dict[tuple[str, str, int], Block] = {}
    numbers = {place.label: number for number, place in enumerate(places)}
    for number, place in enumerate(places):
        for result in place.results:
            key = (result.family, result.variant, number)
            blocks.setdefault(key, Block(*key)).results.append(result)
    for row in sorted(rows_of(places), key=lambda row: (not _binds(row), row.claim)):
        blocks[row.family, row.variant, numbers[row.label]].rows.append(row)
    return places, [blocks[key] for key in sorted(blocks)]


def lines_of(block: Block, places: Sequence[Document]) -> list[Line]:
    """Return the lines of one variant in one environment."""
    place = places[block.place]
    return [_line(row, block, place) for row in block.rows]


def _line(row: Row, block: Block, place: Document) -> Line:
    results = [result for result, _ in row.parts]
    verdict = row.verdict
    check = _deciding(results, verdict.reason) if verdict.name in _PROVES_NOTHING else None
    exactness, kind = _exactness(results)
    kills, survived = _kills(results)
    names = [clean(result.configuration, MOST_NAME) for result in results]
    return Line(
        family=clean(block.family, MOST_NAME),
        variant=clean(block.variant, MOST_NAME),
        only=_only(row, block, names),
        claim=clean(row.claim.replace("_", " "), MOST_NAME),
        backend=clean(place.environment.backend, MOST_NAME) or place.label,
        label=place.label,
        verdict=verdict.name,
        claimed=row.claimed or "",
        standing=row.standing,
        code=clean(check.code, 20) if check else "",
        why=clean(f"{check.name}: {check.reason}" if check else _why(verdict.name, verdict.reason, results)),
        exactness=exactness,
        exactness_class=kind,
        kills=kills,
        survived=survived,
        also=clean(" ".join(names)),
    )


def _only(row: Row, block: Block, names: Sequence[str]) -> str:
    """Return of which configurations a line speaks, where the variant has another line that claims something."""
    if not any(other is not row and other.claim == row.claim and _binds(other) for other in block.rows):
        return ""
    return ", ".join(names) if len(names) <= _MOST_NAMED else f"{len(names)} configurations"


def _binds(row: Row) -> bool:
    return row.standing != "claims nothing"


def _deciding(results: Sequence[Result], reason: str) -> CheckResult | None:
    """Return the check that a reason speaks of; a record that lapsed has a reason of its own."""
    for status in ("fail", "not-run"):
        for result in results:
            for check in result.checks:
                if check.status == status and reason.startswith(f"{check.code} "):
                    return check
    return None


def _why(verdict: VerdictName, reason: str, results: Sequence[Result]) -> str:
    if verdict == "limited":
        limits = [limit for result in results for limit in result.limits]
        return " ".join(dict.fromkeys(limits)) or reason
    if verdict in _PROVES_NOTHING:
        return reason
    passed = sum(check.status == "pass" for result in results for check in result.checks)
    return f"{passed:,} checks passed on {len(results)} configuration{'s' if len(results) != 1 else ''}"


def _exactness(results: Sequence[Result]) -> tuple[str, str]:
    """Return the largest relative difference of the logits, and the class that was asked for."""
    found = [
        figures
        for result in results
        for check in result.checks
        if check.code == "PAR001" and check.status == "pass"
        for figures in [check.figures.get("float32")]
        if isinstance(figures, dict) and _is_number(figures.get("minimum_tolerance"))
    ]
    if not found:
        return "", ""
    worst = max(found, key=lambda figures: figures["minimum_tolerance"])
    largest = worst["minimum_tolerance"]
    return "bit-equal" if largest == 0 else f"≤ {_scientific(largest)}", clean(worst.get("class", ""), 20)


def _scientific(value: float) -> str:
    """Return a number with two digits, rounded up, since it is a bound: `1.7e−6`."""
    digits, _, power = f"{value:.1e}".partition("e")
    if float(f"{digits}e{power}") < value:
        digits, _, power = f"{float(digits) + 0.1:.1f}", "", power
        if float(digits) >= 10:
            digits, power = "1.0", str(int(power) + 1)
    return f"{digits}e{int(power)}".replace("-", "−")


def _kills(results: Sequence[Result]) -> tuple[str, int]:
    summary = next((result.faults for result in results if result.faults is not None), None)
    if summary is None:
        return "", 0
    killed, survived = sum(map(len, summary.killed.values())), len(summary.survived)
    return f"{killed} / {killed + survived}", survived


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value) and value >= 0
