"""Results as items that pass or fail: all items of a target pass exactly when its exit code is 0."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from mlx_audit.audit.exit_codes import HOLDS, code_of_claim, is_binding
from mlx_audit.audit.failure_text import detail_lines
from mlx_audit.errors import clean
from mlx_audit.evidence.codes import claims_on
from mlx_audit.evidence.results import CheckResult, Result

VERDICT = "verdict"
"""Name of the item that holds a variant's claims against what was found."""

_NEEDS = re.compile(r"needs ([A-Z]{3}\d{3}), which ")
"""How the reason of a check begins that was not run because of another one."""


_WORDS = {"fail": "failed", "not-run": "not run"}


@dataclass(frozen=True)
class Failure:
    """Why an item fails.

    Attributes:
        text: Lines for people.
        causes: The items that it comes down to: itself, or those that it rests on.
    """

    text: str
    causes: frozenset[str]


@dataclass(frozen=True)
class _Finding:
    """What is wrong on one configuration: in a line, and in lines below it."""

    configuration: str
    what: str
    cause: str
    details: tuple[str, ...] = ()


def failure_of(item: str, results: Sequence[Result]) -> Failure | None:
    """Return why an item of a variant fails, or None where it passes.

    A check passes where it passed, does not apply, or moves nothing, on every configuration. The verdict passes by the
    rule of the exit code.

    Args:
        item: Code of a check, or `verdict`.
        results: Of all configurations of the variant.
    """
    if not results:
        return Failure("the audit has no result of this variant", frozenset({item}))
    found = _verdicts(results) if item == VERDICT else _checks(item, results)
    return Failure(_text(found), frozenset(finding.cause for finding in found)) if found else None


def note_of(code: str, results: Iterable[Result]) -> str | None:
    """Return what is to be said of a check that passes as an item though it did not pass, or None.

    It does not apply on any configuration, or what it found moves nothing there.
    """
    own = [(r, c) for r in results if (c := _check(code, r)) is not None and "on" not in c.figures]
    if all(check.status == "not-applicable" for _, check in own):
        found = [(r, c, "not applicable") for r, c in own]
    else:
        moot = [(r, c) for r, c in own if _is_wrong(c) and not is_binding(r, code)]
        found = [(r, c, f"{_WORDS[c.status]}, where the claim is {_claimed(r, code)}") for r, c in moot]
    return _text(_Finding(r.configuration, f"{how}: {clean(c.reason)}", code) for r, c, how in found) or None


def _claimed(result: Result, code: str) -> str:
    found = [result.claims[name] for name in claims_on(code) if name in result.claims]
    return ", ".join(claim.claimed or "none" for claim in found)


def _verdicts(results: Iterable[Result]) -> list[_Finding]:
    found = []
    for result in results:
        for name, claim in result.claims.items():
            if code_of_claim(result, name, claim) == HOLDS:
                continue
            own = [check for check in result.checks if name in claims_on(check.code)]
            wrong = [check.code for check in own if _is_wrong(check) and is_binding(result, check.code)]
            what = f"claimed {claim.claimed or 'nothing'}, found {claim.verdict}: {clean(claim.reason)}"
            causes = {_root(code, result) for code in wrong} or {VERDICT}
            found += [_Finding(result.configuration, what, cause) for cause in sorted(causes)]
    return found


def _checks(code: str, results: Iterable[Result]) -> list[_Finding]:
    bound = [result for result in results if is_binding(result, code) and _is_asked(code, result)]
    found = [(result, _check(code, result)) for result in bound]
    wrong = [(result, check) for result, check in found if check is None or _is_wrong(check)]
    # A published configuration repeats what a tiny one found.
    own = [(result, check) for result, check in wrong if check is None or "on" not in check.figures]
    return [_finding(code, result, check) for result, check in own or wrong]


def _is_asked(code: str, result: Result) -> bool:
    """Return whether a result has a claim that a check decides; one of a claim that nobody makes is not run."""
    return not result.claims or any(name in result.claims for name in claims_on(code))


def _finding(code: str, result: Result, check: CheckResult | None) -> _Finding:
    if check is None:
        return _Finding(result.configuration, f"not run: {clean(result.reason)}", code)
    if check.status == "fail":
        lines = (f"  {check.code}: {check.name}", *(line for line, _ in detail_lines(check)))
        return _Finding(result.configuration, clean(check.reason), code, lines)
    cause = _root(code, result)
    if cause == code:
        return _Finding(result.configuration, f"not run: {clean(check.reason)}", code)
    root = _check(cause, result)
    why = "failed" if root is not None and root.status == "fail" else "was not run"
    return _Finding(result.configuration, f"not run: it rests on {cause}, which {why}", cause)


def _root(code: str, result: Result) -> str:
    """Return the check that one which is wrong comes down to, over those that each of them needs."""
    seen = {code}
    while True:
        check = _check(code, result)
        needed = _NEEDS.match(check.reason) if check is not None and check.status == "not-run" else None
        if needed is None or needed[1] in seen or _check(needed[1], result) is None:
            return code
        code = needed[1]
        seen.add(code)


def _check(code: str, result: Result) -> CheckResult | None:
    return next((check for check in result.checks if check.code == code), None)


def _is_wrong(check: CheckResult) -> bool:
    return check.status in ("fail", "not-run")


def _text(findings: Iterable[_Finding]) -> str:
    """One paragraph for each thing that is wrong, with all configurations that it is wrong on."""
    groups: dict[str, list[_Finding]] = {}
    for finding in findings:
        groups.setdefault(finding.what, []).append(finding)
    lines: list[str] = []
    for what, (first, *more) in groups.items():
        lines += [f"{clean(first.configuration)}: {what}", *first.details]
        others = dict.fromkeys(finding.configuration for finding in more)
        others.pop(first.configuration, None)
        if others:
            lines.append(f"  also on: {', '.join(map(clean, others))}")
    return "\n".join(lines)
