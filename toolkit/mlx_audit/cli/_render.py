"""Results as text for people: one line a result, details of what failed, a summary line."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from mlx_audit.audit.exit_codes import CLAIM_FAILED, HOLDS, NOTHING, UNDECIDED, USAGE, code_of
from mlx_audit.audit.failure_text import failure_lines
from mlx_audit.audit.runner import Outcome
from mlx_audit.errors import clean
from mlx_audit.evidence.codes import DECODE, RESTORE, own_checks
from mlx_audit.evidence.results import Result

if TYPE_CHECKING:
    from rich.console import Console

SYMBOLS = {
    "capable": ("●", "green"),
    "limited": ("◐", "yellow"),
    "not-capable": ("✕", "red"),
    "undecided": ("?", "magenta"),
}
"""Symbol and colour of each verdict."""

_STATUS_WORDS = {"pass": "passed", "fail": "failed", "not-run": "not run", "not-applicable": "not applicable"}


def show_outcomes(console: Console, outcomes: Sequence[Outcome], *, partial: bool) -> None:
    """Print one line a result, in columns, with the details of failures below."""
    from rich.text import Text

    results = [result for outcome in outcomes for result in outcome.results]
    widths = [
        max((len(cell) for cell in column), default=0) for column in zip(*map(_cells, results), strict=True)
    ]
    for result in results:
        symbol, colour = SYMBOLS[result.verdict]
        cells = [cell.ljust(width) for cell, width in zip(_cells(result), widths, strict=True)]
        line = Text.assemble((f"{symbol} {cells[0]}", colour), "  ", (cells[1], "bold"), "  ")
        line.append("  ".join(cells[2:]) + "  ")
        line.append(_why(result, partial))
        _print(console, line)
        for text, style in _details(result):
            _print(console, Text(f"    {text}", style))
    for outcome in outcomes:
        for text in _skipped(outcome):
            _print(console, Text(text, "dim"))


def summary(outcomes: Sequence[Outcome], code: int, seconds: float, *, partial: bool) -> str:
    """The last line: counts, and what the exit code means."""
    results = [result for outcome in outcomes for result in outcome.results]
    counts = {name: sum(result.verdict == name for result in results) for name in SYMBOLS}
    shown = ", ".join(f"{count} {name}" for name, count in counts.items() if count)
    noun = "result" if len(results) == 1 else "results"
    head = f"{len(results)} {noun} in {seconds:.1f} s" + (f": {shown}" if shown else "")
    return f"{head}; {_meaning(results, code, partial)}"


def _meaning(results: Sequence[Result], code: int, partial: bool) -> str:
    failed = [result for result in results if code_of(result, partial=partial) == code]
    names = ", ".join(clean(f"{r.family} {r.variant} {r.configuration}") for r in failed[:3])
    more = f" and {len(failed) - 3} more" if len(failed) > 3 else ""
    texts = {
        HOLDS: "the selected checks hold" if partial else "all claims hold",
        CLAIM_FAILED: f"failed: {names}{more}",
        USAGE: "a target cannot be audited",
        NOTHING: "nothing was collected",
        UNDECIDED: f"cannot be decided here: {names}{more}",
    }
    open_claims = sum(c.claimed == "undecided" for r in results for c in r.claims.values())
    note = f" ({open_claims} claimed undecided, which moves nothing)" if open_claims and code == HOLDS else ""
    return texts[code] + note


def _cells(result: Result) -> list[str]:
    claim = result.claims.get(DECODE)
    claimed = claim.claimed if claim is not None else None
    return [
        result.verdict,
        clean(f"{result.family} {result.variant}"),
        clean(result.configuration),
        f"claimed {claimed}" if claimed is not None else "no claim",
    ]


def brief_line(result: Result) -> str:
    """A result of a partial audit as one line, with the place of each failure."""
    failed = [
        f"{check.code} at {check.where or check.reason}" for check in result.checks if check.status == "fail"
    ]
    cells = [SYMBOLS[result.verdict][0], *_cells(result)[:3]]
    return f"{' '.join(cells)}: {'; '.join(failed) or _why(result, partial=True)}"


def _why(result: Result, partial: bool) -> str:
    """What decided, in a clause; a failed check's own reason stands in the lines below."""
    failed = _failed(result, DECODE)
    if failed:
        return failed + _restore(result)
    if partial and result.checks:
        return _failed(result, RESTORE) or _status_counts(result)
    return clean(result.reason) + _restore(result)


def _failed(result: Result, claim: str) -> str:
    """The first failed check of a claim, in a clause; empty where none failed."""
    failed = next((check for check in own_checks(result.checks, claim) if check.status == "fail"), None)
    if failed is None:
        return ""
    on = f" (on {clean(failed.figures['on'])})" if "on" in failed.figures else ""
    return f"{failed.code} failed{on}"


def _restore(result: Result) -> str:
    """What was found of restored prefixes, in a clause; empty where nothing was claimed of them."""
    found = result.claims.get(RESTORE)
    if found is None:
        return ""
    claimed = f", claimed {found.claimed}" if found.claimed not in (None, found.verdict) else ""
    why = _failed(result, RESTORE) or clean(found.reason)
    return f"; prefix restore {found.verdict}{claimed}: {why}"


def _details(result: Result) -> Iterator[tuple[str, str]]:
    """Lines below a result, with style: the cost of a step, and each failed check of its own."""
    for check in result.checks:
        if "cost" in check.figures and not result.configuration.startswith("tiny"):
            yield cost_line(check.figures["cost"]), "dim"
    if result.verdict in ("capable", "limited"):
        for check in result.checks:
            for condition in check.figures.get("conditional", ()) if check.code.startswith("SRC") else ():
                if not condition["what"].startswith(
                    "mlx_lm/models/rope_utils.py:"
                ):  # a RoPE kind has its own claim
                    yield (
                        f"not of a model that reaches {condition['what']} (when {condition['when']})",
                        "yellow",
                    )
    for check in result.checks:
        if check.status == "fail" and "on" not in check.figures:
            yield from failure_lines(check)


def cost_line(cost: dict[str, Any]) -> str:
    """What one decode step reads, from the figures of a trace."""
    return (
        f"a step at {cost['capacity']:,} tokens reads {human_bytes(cost['weights_bytes'])} of weights and "
        f"{human_bytes(cost['cache_bytes'])} of cache in {cost['primitives']:,} primitives; "
        f"{growth(cost)}"
    )


def growth(cost: dict[str, Any]) -> str:
    """Where the cache costs as much as the weights; a cache of constant size gets there never, or is there already."""
    if cost["equal_capacity"]:
        return f"cache equals weights at {cost['equal_capacity']:,} tokens"
    if cost["cache_bytes"] >= cost["weights_bytes"]:
        return "the cache outweighs the weights at any capacity"
    return "the cache does not grow with the text"


def human_bytes(count: int) -> str:
    """A size with three digits: `811 GB`."""
    size = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if size < 999.5:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} TB"


def _skipped(outcome: Outcome) -> Iterator[str]:
    """One line a reason, naming every configuration that was left out."""
    by_reason: dict[str, list[str]] = {}
    for item in outcome.skipped:
        name, _, reason = item.partition(": ")
        by_reason.setdefault(reason, []).append(name)
    for reason, names in by_reason.items():
        yield clean(f"{outcome.request.family}: not traced ({reason}): {', '.join(names)}")


def _status_counts(result: Result) -> str:
    counts = {word: sum(c.status == status for c in result.checks) for status, word in _STATUS_WORDS.items()}
    shown = ", ".join(f"{count} {word}" for word, count in counts.items() if count)
    first = next((c for c in result.checks if c.status == "not-run"), None)
    why = f"; {first.code} was not run: {clean(first.reason)}" if first is not None else ""
    return f"partial: {shown}{why}"


def _print(console: Console, text: Any) -> None:
    # Away from a terminal a line stays a line, however long it is.
    console.print(text, soft_wrap=not console.is_terminal)
