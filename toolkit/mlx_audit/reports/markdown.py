"""Markdown for a job summary: the verdict first, then what failed, then every claim, then details on demand."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from mlx_audit.evidence.results import CheckResult, Result, Results
from mlx_audit.reports.claimed import Found, Row, deciding_check, rows_of, wrong_checks
from mlx_audit.reports.documents import (
    Document,
    Standing,
    figure_text,
    gathered,
    known_environment,
    own_figures,
)
from mlx_audit.reports.markup import code, command, fenced, html, prose

LIMIT = 1 << 20
"""Bytes that GitHub takes of a step's summary; one more, and it shows nothing."""

_RESERVE = 4_096
"""Bytes kept for headings, and for the lines that say what was left out."""

_SHARES = {"failures": 0.5, "claims": 0.8, "details": 1.0}
"""Up to which part of the limit each section may fill the page."""

_SYMBOLS = {"capable": "●", "limited": "◐", "not-capable": "✕", "undecided": "?"}
_WORDS: dict[Standing, str] = {
    "fails": "**fails**",
    "undecided": "**undecided**",
    "in part": "in part",
    "holds": "holds",
    "claims nothing": "claims nothing",
}
_VERBS: dict[Standing, tuple[str, str]] = {
    "fails": ("fails", "fail"),
    "undecided": ("cannot be decided", "cannot be decided"),
    "in part": (
        "was looked at in part, which proves nothing",
        "were looked at in part, which proves nothing",
    ),
    "holds": ("holds", "hold"),
}
"""What one claim does, and what several do."""

_UNRECORDED = ("stale:", "no record")
"""How the reason begins of a claim that a new record would mend."""

_MOST_CHECKS = 10
_MOST_NAMES = 5
_MOST_FIGURES = 8


def render(documents: Sequence[Results]) -> str:
    """Return the page, in less than 1 MiB; what does not fit is left out from the end, and counted."""
    parts = gathered(documents)
    rows = rows_of(parts)
    page = _Page()
    page.write(f"# mlx-audit: {verdict_sentence(rows)}", "")
    page.write(*_environments(parts))
    for standing, title in (("fails", "Failed claims"), ("undecided", "Cannot be decided")):
        own = [row for row in rows if row.standing == standing]
        page.section(title, "failures", "claims", map(_failure, own))
    page.section("Claims", "claims", "rows", map(_table_row, rows), head=_TABLE_HEAD)
    page.section("Details", "details", "variants", _details(rows))
    return page.text


def verdict_sentence(rows: Sequence[Row]) -> str:
    """Return the verdict over all claims in one sentence."""
    counts = {standing: sum(row.standing == standing for row in rows) for standing in _VERBS}
    silent = sum(row.standing == "claims nothing" for row in rows)
    claims = len(rows) - silent
    found = [(count, _VERBS[standing][count != 1]) for standing, count in counts.items() if count]
    parts = [f"{count:,} {verb}" for count, verb in found]
    if claims == 1:
        parts = [f"the claim {found[0][1]}"]
    elif claims and counts["holds"] == claims:
        parts = [f"all {claims:,} claims hold"]
    elif claims:
        parts[0] = f"{found[0][0]:,} of {claims:,} claims {found[0][1]}"
    if silent:
        parts.append(f"{silent:,}{' more' if claims else ''} {'claims' if silent == 1 else 'claim'} nothing")
    return ", ".join(parts) or "nothing was collected"


class _Page:
    """A text that grows to its limit and no further."""

    def __init__(self) -> None:
        self._lines: list[str] = []
        self._bytes = 0

    @property
    def text(self) -> str:
        """All of it, with a newline at the end."""
        return "\n".join(self._lines).rstrip("\n") + "\n"

    def write(self, *lines: str) -> None:
        """Add lines whatever their size."""
        self._lines += lines
        self._bytes += sum(len(line.encode()) + 1 for line in lines)

    def section(
        self, title: str, share: str, noun: str, blocks: Iterable[str], head: Sequence[str] = ()
    ) -> None:
        """Add a section of blocks as far as they fit, and say how many did not; nothing where there are none."""
        room = _SHARES[share] * (LIMIT - _RESERVE)
        left_out = written = 0
        for block in blocks:
            if left_out or self._bytes + len(block.encode()) >= room:
                left_out += 1
                continue
            if not written:
                self.write("", f"## {title}", "", *head)
            self.write(block)
            written += 1
        if left_out:
            self.write(
                "" if written else f"\n## {title}\n",
                f"… and {left_out:,} more {noun}, left out here for their size.",
            )


def _environments(documents: Sequence[Document]) -> Iterator[str]:
    for document in documents:
        known = [
            f"{name} {code(v)}" for name, v in known_environment(document.environment) if name != "backend"
        ]
        count = _number(len(document.results), "results", "result")
        yield f"- {code(document.label)}: {count}; {', '.join(known) or 'versions unknown'}"


# What failed, and what cannot be decided.


def _failure(row: Row) -> str:
    claimed = f"claimed {code(row.claimed)}" if row.claimed else "without a claim"
    title = (
        f"### {code(row.family)} {code(row.variant)}, {code(row.label)}: {_claim_name(row)} {claimed}, found "
    )
    found = wrong_checks(row)
    lines = [f"{title}{code(row.verdict.name)}", ""]
    for item in found[:_MOST_CHECKS]:
        lines += _finding(item)
    if not found:
        lines += [f"- {prose(row.verdict.reason) or 'no reason is known'}", "", fenced(_again(row)), ""]
    if len(found) > _MOST_CHECKS:
        lines += [f"- and {len(found) - _MOST_CHECKS:,} more findings", ""]
    return "\n".join(lines)


def _finding(found: Found) -> Iterator[str]:
    check, results = found.check, found.results
    yield f"- **{code(check.code, 20)}** {prose(check.name, 200)}: {prose(check.reason)}"
    if check.where:
        yield f"  - at {code(check.where)}"
    yield f"  - on {_names(results)}"
    yield ""
    again = command("mlx-audit", "run", results[0].target, "--only", check.code)
    yield from (f"  {line}" for line in fenced(check.reproduce or again).split("\n"))
    yield ""


def _again(row: Row) -> str:
    """The command that looks at a row again, or makes its record anew."""
    record = ["--record"] if row.verdict.reason.startswith(_UNRECORDED) else []
    return command("mlx-audit", "run", row.parts[0][0].target, *record)


# The table of claims.

_TABLE_HEAD = (
    "| | family | variant | backend | claim | claimed | found | configurations | decided by |",
    "|---|---|---|---|---|---|---|---|---|",
)


def _table_row(row: Row) -> str:
    verdict = row.verdict
    deciding = deciding_check(row)
    results = [result for result, _ in row.parts]
    cells = (
        _WORDS[row.standing],
        code(row.family, 100),
        code(row.variant, 100),
        code(row.label, 100),
        _claim_name(row),
        row.claimed or "–",
        f"{_SYMBOLS[verdict.name]} {verdict.name}",
        _names(results, 2) if len(results) < 3 else f"{len(results):,}",
        code(deciding, 20) if deciding else prose(verdict.reason, 200) or "–",
    )
    return f"| {' | '.join(cells)} |"


# Details on demand.


def _details(rows: Iterable[Row]) -> Iterator[str]:
    """Yield a block for each row; claims of the same results share one."""
    seen = set()
    for row in rows:
        results = [result for result, _ in row.parts]
        key = tuple(map(id, results))
        if key not in seen:
            seen.add(key)
            yield "\n".join(_variant(row, results))


def _variant(row: Row, results: Sequence[Result]) -> Iterator[str]:
    first = results[0]
    name = f"{html(row.family)} {html(row.variant)}, {html(row.label)}"
    count = _number(len(results), "configurations", "configuration")
    yield f"<details><summary>{name}: {row.verdict.name}, {count}</summary>"
    yield ""
    yield f"Configurations: {_names(results, 30)}. Profile {code(first.profile)}, seed {first.seed}."
    if first.faults is not None:
        killed = sum(map(len, first.faults.killed.values()))
        survived = (
            f"; survived: {', '.join(map(code, first.faults.survived[:30]))}" if first.faults.survived else ""
        )
        unseen = len(first.faults.survived)
        yield f"Planted faults: {killed:,} seen by the check named for them, {unseen:,} not{survived}."
    yield ""
    yield from _check_table(results, told=row.standing == "fails")
    yield "</details>"
    yield ""


def _check_table(results: Sequence[Result], *, told: bool) -> Iterator[str]:
    """Yield the table of checks; a failure has its reason and place here unless the page `told` them before."""
    by_code: dict[str, list[CheckResult]] = {}
    for result in results:
        for check in result.checks:
            by_code.setdefault(check.code, []).append(check)
    if by_code:
        yield "| check | must hold | found | reason, figures |"
        yield "|---|---|---|---|"
    for name, checks in by_code.items():
        first = next((check for check in checks if check.status == "fail"), checks[0])
        figures = [f"{code(k, 60)} {code(figure_text(v), 120)}" for k, v in own_figures(first).items()]
        more = f", {len(figures) - _MOST_FIGURES} more" if len(figures) > _MOST_FIGURES else ""
        reason = [] if told or first.status != "fail" else [_reason(first)]
        shown = "; ".join([*reason, *([", ".join(figures[:_MOST_FIGURES]) + more] if figures else [])])
        yield f"| {code(name, 20)} | {prose(checks[0].name, 200)} | {_statuses(checks)} | {shown} |"
    if by_code:
        yield ""


def _reason(check: CheckResult) -> str:
    place = f" at {code(check.where, 120)}" if check.where else ""
    return f"{prose(check.reason, 200)}{place}"


def _statuses(checks: Sequence[CheckResult]) -> str:
    words = {"fail": "**failed**", "not-run": "not run", "pass": "passed", "not-applicable": "not applicable"}
    counts = [(word, sum(check.status == status for check in checks)) for status, word in words.items()]
    return ", ".join(word if n == len(checks) else f"{word} {n:,}×" for word, n in counts if n)


def _claim_name(row: Row) -> str:
    return prose(row.claim.replace("_", " "), 60)


def _names(results: Sequence[Result], most: int = _MOST_NAMES) -> str:
    names = list(dict.fromkeys(result.configuration for result in results))
    shown = ", ".join(code(name, 120) for name in names[:most])
    return shown + (f" and {len(names) - most:,} more" if len(names) > most else "")


def _number(count: int, plural: str, singular: str) -> str:
    return f"{count:,} {singular if count == 1 else plural}"
