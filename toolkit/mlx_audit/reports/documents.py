"""What the writers share: documents of one environment put together, and where each claim stands."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from mlx_audit.audit.exit_codes import CLAIM_FAILED, HOLDS, code_of_claim
from mlx_audit.errors import clean
from mlx_audit.evidence.results import CheckResult, ClaimResult, Environment, Result, Results

Standing = Literal["fails", "undecided", "in part", "holds", "claims nothing"]

STANDINGS: tuple[Standing, ...] = ("fails", "undecided", "in part", "holds", "claims nothing")
"""From the worst on."""

UNNAMED = "results"
"""Label of a document that does not know its backend."""

_NESTED = 4
"""Lists and groups within each other that are told as such; what lies deeper is told as Python has it."""

_PARTIAL = "partial:"
"""How the reason of a verdict begins where only some tiers or checks were selected."""


@dataclass(frozen=True)
class Document:
    """All results that were made in one environment.

    Attributes:
        label: Short name that no other document of the report has: `cpu`, or `cpu, mlx 0.32.4`.
    """

    label: str
    environment: Environment
    results: Sequence[Result]


def gathered(documents: Iterable[Results]) -> list[Document]:
    """Return the documents with those of equal environments put together, in the order given."""
    found: dict[tuple[str | None, ...], tuple[Environment, list[Result]]] = {}
    for document in documents:
        key = tuple(document.environment.model_dump().values())
        found.setdefault(key, (document.environment, []))[1].extend(document.results)
    parts = list(found.values())
    labels = _labels([environment for environment, _ in parts])
    return [Document(label, *part) for label, part in zip(labels, parts, strict=True)]


def claims_of(result: Result) -> dict[str, ClaimResult]:
    """Return a result's claims by name; a result without any is one that nothing was claimed of."""
    found = ClaimResult(claimed=None, verdict=result.verdict, reason=result.reason)
    return result.claims or {"compiled_decode": found}


def standing_of(result: Result, claim: ClaimResult, name: str) -> Standing:
    """Return where one claim of a result stands, by the rule of the exit code; `name` is the claim's."""
    if claim.claimed == "undecided":
        return "claims nothing"
    partial = claim.verdict == "undecided" and claim.reason.startswith(_PARTIAL)
    code = code_of_claim(result, name, claim, partial=partial)
    if code == HOLDS:
        return "in part" if partial else "holds"
    return "fails" if code == CLAIM_FAILED else "undecided"


def worst(standings: Iterable[Standing]) -> Standing:
    """Return the worst of several."""
    return min(standings, key=STANDINGS.index)


def known_environment(environment: Environment) -> Iterator[tuple[str, str]]:
    """Yield the name and value of what is known of an environment."""
    names = {"mlx_audit": "mlx-audit", "mlx_lm": "mlx-lm"}
    for name, value in environment.model_dump().items():
        if value:
            yield names.get(name, name), clean(value)


def figure_text(value: object, limit: int = 200) -> str:
    """Return a measured value in one line."""
    if isinstance(value, dict):
        return clean(_pairs(value, _NESTED), limit)
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return clean("; ".join(value), limit)
    return clean(_value_text(value, _NESTED), limit)


def _value_text(value: object, depth: int) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, list) and depth:
        return f"[{', '.join(_value_text(item, depth - 1) for item in value)}]"
    if isinstance(value, dict) and depth:
        return f"{{{_pairs(value, depth)}}}"
    return str(value)


def _pairs(value: dict[str, object], depth: int) -> str:
    return ", ".join(f"{name} {_value_text(item, depth - 1)}" for name, item in value.items())


def own_figures(check: CheckResult) -> dict[str, object]:
    """Return the figures of a check that are no sentences: what others say in words is left out."""
    return {name: v for name, v in check.figures.items() if name not in ("on", "conditional", "located")}


def _labels(environments: Sequence[Environment]) -> list[str]:
    """Tell the environments apart by backend, then by versions and platform, at last by number."""
    labels = [clean(environment.backend) or UNNAMED for environment in environments]
    for name in ("mlx", "mlx_lm", "mlx_audit", "platform", "python", "compiler"):
        if len(set(labels)) == len(labels):
            return labels
        values = [clean(getattr(environment, name) or "unknown") for environment in environments]
        if len(set(values)) > 1:
            labels = [f"{label}, {name} {v}" for label, v in zip(labels, values, strict=True)]
    return [f"{label} ({number})" for number, label in enumerate(labels, start=1)]
