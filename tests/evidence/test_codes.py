"""Codes are read from source, and are the ones that the checks have."""

from __future__ import annotations

from mlx_audit.checks.base import all_checks
from mlx_audit.evidence.codes import known_codes


def test_codes_in_the_source_are_those_of_the_checks() -> None:
    assert known_codes() == sorted(check.code for check in all_checks())
