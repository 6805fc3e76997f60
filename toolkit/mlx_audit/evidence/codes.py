"""The codes of all checks, read from their source: importing them would load MLX into the command line's process."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import mlx_audit

_CODE = re.compile(r'^    code = "([A-Z]{3}\d{3})"\n    tier = "([a-z]+)"$', re.MULTILINE)


def known_codes() -> list[str]:
    """Return the codes in alphabetical order."""
    return sorted(check_tiers())


def needed_codes() -> frozenset[str]:
    """Return the codes that a verdict rests on: all but those of the checkpoint tier."""
    return frozenset(code for code, tier in check_tiers().items() if tier != "checkpoint")


@cache
def check_tiers() -> dict[str, str]:
    """Return the tier of each check by its code."""
    folder = Path(mlx_audit.__file__).parent / "checks"
    return dict(
        pair
        for path in sorted(folder.glob("*.py"))
        for pair in _CODE.findall(path.read_text(encoding="utf-8"))
    )
