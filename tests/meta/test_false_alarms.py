"""A healthy model is never accused: random stacks, sizes, texts, seeds and dtypes."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import HealthCheck, Phase, given, settings

from meta.healthy_runs import HealthyRun, false_alarms, healthy_runs


def _run(count: int) -> Counter[str]:
    """Audit so many random healthy runs, and return how many had each topology."""
    seen: Counter[str] = Counter()

    @settings(
        max_examples=count,
        derandomize=True,
        database=None,
        deadline=None,
        phases=(Phase.generate,),
        suppress_health_check=list(HealthCheck),
    )
    @given(run=healthy_runs())
    def audited(run: HealthyRun) -> None:
        seen[run.topology] += 1
        assert false_alarms(run) == []

    audited()
    return seen


def test_no_false_alarm_in_100_healthy_runs() -> None:
    seen = _run(100)
    assert seen.total() == 100
    assert len(seen) == 9


@pytest.mark.nightly
def test_no_false_alarm_in_1000_healthy_runs() -> None:
    assert _run(1000).total() == 1000
