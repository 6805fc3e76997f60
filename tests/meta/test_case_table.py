"""The page of public bug reports is what the trials and the planted faults make of it."""

from __future__ import annotations

from meta.case_table import PAGE, PLANTED, cases, render
from mlx_audit.faults import FAULTS


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text(encoding="utf-8") == render(), "python tests/meta/case_table.py writes it anew"


def test_every_report_is_tried_and_planted() -> None:
    addresses = {case.address for case in cases()}
    assert len(addresses) == len(PLANTED) == 15
    assert all(sum(address.endswith(end) for end in PLANTED) == 1 for address in addresses)
    assert {name for names in PLANTED.values() for name in names} <= FAULTS.keys()
