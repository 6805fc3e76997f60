"""A healthy model is never accused: random stacks, sizes, texts, seeds and dtypes."""

from __future__ import annotations

import pytest

from meta.healthy_runs import false_alarms, healthy_run

PARTS = 4
"""So that they run side by side."""


def _accused(numbers: range) -> dict[int, list[str]]:
    """Return what the audit says against the healthy runs of these numbers."""
    return {number: found for number in numbers if (found := false_alarms(healthy_run(number)))}


@pytest.mark.parametrize("part", range(PARTS))
def test_no_false_alarm_in_100_healthy_runs(part: int) -> None:
    assert _accused(range(part, 100, PARTS)) == {}


@pytest.mark.nightly
def test_no_false_alarm_in_1000_healthy_runs() -> None:
    assert _accused(range(100, 1100)) == {}
