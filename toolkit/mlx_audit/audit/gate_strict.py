"""`gate --strict`: the audits of valid records are run again, and must find what the records say.

What must be equal: the configurations, each one's verdict, each check's status, and every figure that is no fraction
(counts, names, lists of them). Fractions, such as the largest difference of two logits, are measured, and another
processor rounds otherwise: they may be `BAND` times larger or smaller, or both lie below `FLOOR`. Where the class is
`exact` nothing is rounded otherwise, and they must be equal.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from mlx_audit.audit.gate import Gated
from mlx_audit.audit.recording import is_claimed, stable
from mlx_audit.audit.request import Options, Request
from mlx_audit.audit.runner import TIMEOUT_SECONDS, Listener, Outcome, run_audits
from mlx_audit.evidence.codes import CLAIMS, DECODE, RESTORE, own_checks
from mlx_audit.evidence.record_schema import RecordedVariant
from mlx_audit.evidence.results import CheckResult, Result
from mlx_audit.evidence.standing import Evidence, Standing, State
from mlx_audit.models.target import resolve_target

BAND = 10.0
"""By what factor a measured figure may differ from the recorded one."""

FLOOR = 1e-5
"""Figures up to it are roundings of float32, of whatever size."""

_MOST_TOLD = 3
_LACKS = "is not recorded"
"""How a difference ends that makes a record weaker, but nothing in it wrong."""


def audit_again(
    gated: Sequence[Gated],
    *,
    jobs: int | None = None,
    timeout: float = TIMEOUT_SECONDS,
    listener: Listener | None = None,
) -> list[Gated]:
    """Return how the claims stand after the audits of all usable records were run again, in children.

    Claims that fail by their record already stay as they are. A claim whose audit finds something else than the record
    says is `contradicted`, or `weaker` where the record only says less; one that this environment cannot decide is
    `undecided`.

    Args:
        gated: On this machine's backend.
        jobs: Most children at a time; the number of processors by default.
        timeout: Seconds that one family may take.
        listener: Told of each event as it comes.
    """
    asked: list[tuple[int, tuple[str, int]]] = []
    requests = []
    for index, one in enumerate(gated):
        for profile, seed in _settings(one):
            asked.append((index, (profile, seed)))
            target = resolve_target(one.evidence.target)
            requests.append(Request.of(target, Options(profile=profile, seed=seed)))
    outcomes = run_audits(requests, jobs=jobs, timeout=timeout, listener=listener)
    found: dict[int, dict[tuple[str, int], Outcome]] = {}
    for (index, settings), outcome in zip(asked, outcomes, strict=True):
        found.setdefault(index, {})[settings] = outcome
    return [_compared(one, found.get(index, {})) for index, one in enumerate(gated)]


def _settings(one: Gated) -> list[tuple[str, int]]:
    """Return the profiles and seeds with which a record's variants were audited; none where no claim holds by it."""
    holding = {standing.variant for standing in one.standings if standing.state == "holds"}
    variants = one.evidence.record.variants if one.evidence.record is not None else {}
    return list(dict.fromkeys((v.profile, v.seed) for name, v in variants.items() if name in holding))


def _compared(one: Gated, outcomes: Mapping[tuple[str, int], Outcome]) -> Gated:
    if not outcomes:
        return one
    assert one.evidence.record is not None
    verdicts = {
        (name, claim): _judge(variant, name, outcomes[variant.profile, variant.seed], claim)
        for name, variant in one.evidence.record.variants.items()
        for claim in CLAIMS
        if (variant.profile, variant.seed) in outcomes
    }
    return replace(one, standings=tuple(_changed(one.evidence, s, verdicts) for s in one.standings))


def _changed(
    evidence: Evidence, standing: Standing, found: Mapping[tuple[str, str], tuple[State, str]]
) -> Standing:
    """Return a claim's standing with what the new audit of its variant found; a claim that failed stays as it is."""
    if standing.state != "holds":
        return standing
    state, reason = found[standing.variant, RESTORE if standing.claim == RESTORE else DECODE]
    return replace(standing, state=state, reason=reason, fix="" if state == "holds" else evidence.fix)


def _judge(variant: RecordedVariant, name: str, outcome: Outcome, claim: str) -> tuple[State, str]:
    if outcome.failed is not None:
        return "undecided", f"it cannot be audited here: {outcome.failed.message}"
    results = {r.configuration: r for r in outcome.results if r.variant == name and is_claimed(r)}
    for result in results.values():
        verdict, reason = _verdict(result, claim)
        if verdict == "undecided":
            return "undecided", f"audited again, {result.configuration} is undecided: {reason}"
    found = list(differences(variant, results, claim))
    if not found:
        return "holds", f"audited again: {variant.verdict(claim).reason}"
    more = f" and {len(found) - _MOST_TOLD} more differences" if len(found) > _MOST_TOLD else ""
    state: State = "weaker" if all(text.endswith(_LACKS) for text in found) else "contradicted"
    return state, f"audited again: {'; '.join(found[:_MOST_TOLD])}{more}"


def _verdict(result: Result, claim: str) -> tuple[str, str]:
    """Return what an audit found of a claim, and why."""
    found = result.claims.get(claim)
    if claim == DECODE or found is None:
        return result.verdict, result.reason
    return found.verdict, found.reason


def differences(
    variant: RecordedVariant, results: Mapping[str, Result], claim: str = DECODE
) -> Iterator[str]:
    """Yield in what a new audit of a variant differs from what is recorded.

    Args:
        variant: As it is recorded.
        results: Of the new audit, by configuration.
        claim: What is asked; checks of others don't count.
    """
    recorded = {result.configuration: result for result in variant.results}
    for name in results.keys() - recorded.keys():
        yield f"{name} {_LACKS}"
    for name, old in recorded.items():
        if (new := results.get(name)) is None:
            yield f"{name} is recorded, and no longer audited"
            continue
        verdict, reason = _verdict(new, claim)
        if (was := variant.verdict_of(old, claim).name) != verdict:
            yield f"{name} is {verdict} ({reason}), recorded is {was}"
        if variant.limits != new.limits:
            yield f"{name} has other limits than recorded"
        old_checks = {check.code: check for check in own_checks(old.checks, claim)}
        new_checks = {check.code: stable(check) for check in own_checks(new.checks, claim)}
        for code in dict.fromkeys([*old_checks, *new_checks]):
            if code not in old_checks or code not in new_checks:
                yield f"{name}: {code} {_LACKS if code in new_checks else 'is recorded, but no check'}"
            elif old_checks[code].status != (now := new_checks[code].status):
                yield f"{name}: {code} says {now}, recorded is {old_checks[code].status}"
            elif (stated := _stated(old_checks[code])) != (found := _stated(new_checks[code])):
                yield f"{name}: {code} is {found}, recorded is {stated}"
            else:
                for text in figures_differ(old_checks[code].figures, new_checks[code].figures):
                    yield f"{name}: {code} {text}"


def _stated(check: CheckResult) -> tuple[str, str]:
    return check.tier, check.name


def figures_differ(recorded: Any, found: Any, where: str = "", *, exact: bool = False) -> Iterator[str]:
    """Yield where figures differ by more than is allowed, with both values.

    Args:
        recorded: A figure, or figures in dictionaries and lists.
        found: What was measured now.
        where: The names that lead to it.
        exact: Whether fractions must be equal.
    """
    if isinstance(recorded, Mapping) and isinstance(found, Mapping):
        exact = recorded.get("class", "exact" if exact else None) == "exact"
        for key in sorted({*recorded, *found}):
            inner = f"{where}.{key}" if where else str(key)
            if key not in recorded or key not in found:
                yield f"{inner} {_LACKS if key in found else 'is recorded, and was not measured'}"
            else:
                yield from figures_differ(recorded[key], found[key], inner, exact=exact)
    elif isinstance(recorded, list) and isinstance(found, list) and len(recorded) == len(found):
        for index, (old, new) in enumerate(zip(recorded, found, strict=True)):
            yield from figures_differ(old, new, f"{where}[{index}]", exact=exact)
    elif not _agree(recorded, found, exact=exact):
        yield f"{where} is {found!r}, recorded is {recorded!r}"


def _agree(recorded: Any, found: Any, *, exact: bool) -> bool:
    if type(recorded) is not float or type(found) is not float:
        return type(recorded) is type(found) and bool(recorded == found)
    if recorded == found:
        return True
    if exact or not (math.isfinite(recorded) and math.isfinite(found)) or min(recorded, found) < 0:
        return False
    low, high = sorted((recorded, found))
    return high <= FLOOR or high <= BAND * low
