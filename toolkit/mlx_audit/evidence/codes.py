"""The codes of all checks, read from their source: importing them would load MLX into the command line's process."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path

import mlx_audit
from mlx_audit.evidence.results import CheckResult

DECODE = "compiled_decode"
"""Name of the claim that compiled decoding is right."""

RESTORE = "prefix_restore"
"""Name of the claim that going on from a restored prefix equals a cold run."""

CLAIMS = (DECODE, RESTORE)

_RESTS_ON: Mapping[str, frozenset[str]] = {RESTORE: frozenset({"TOP001", "TOP002"})}
"""Checks of another claim that one rests on: a tiny model shows what is true of a variant whose caches it all has."""

_CODE = re.compile(
    r'^    code = "([A-Z]{3}\d{3})"\n    tier = "([a-z]+)"(?:\n    claim = "([a-z_]+)")?$', re.MULTILINE
)


def known_codes() -> list[str]:
    """Return the codes in alphabetical order."""
    return sorted(_stated())


def needed_codes(claim: str = DECODE) -> frozenset[str]:
    """Return the codes that the verdict on a claim rests on: all of its own but those of the checkpoint tier."""
    own = {code for code, (tier, of) in _stated().items() if of == claim and tier != "checkpoint"}
    return rests_on(claim) | own


def rests_on(claim: str) -> frozenset[str]:
    """Return the codes of another claim's checks that must hold for this one to be decided."""
    return _RESTS_ON.get(claim, frozenset())


def claim_of(code: str) -> str:
    """Return the claim that a check decides; a code that is not known is one of compiled decoding."""
    return _stated()[code][1] if code in _stated() else DECODE


def claims_on(code: str) -> list[str]:
    """Return the claims that a check is needed for."""
    return [claim for claim in CLAIMS if claim == claim_of(code) or code in rests_on(claim)]


def own_checks(checks: Iterable[CheckResult], claim: str) -> list[CheckResult]:
    """Return the checks that decide a claim."""
    return [check for check in checks if claim_of(check.code) == claim]


def check_tiers() -> dict[str, str]:
    """Return the tier of each check by its code."""
    return {code: tier for code, (tier, _) in _stated().items()}


@cache
def _stated() -> dict[str, tuple[str, str]]:
    """Return the tier and the claim of each check by its code."""
    folder = Path(mlx_audit.__file__).parent / "checks"
    return {
        code: (tier, claim or DECODE)
        for path in sorted(folder.glob("*.py"))
        for code, tier, claim in _CODE.findall(path.read_text(encoding="utf-8"))
    }
