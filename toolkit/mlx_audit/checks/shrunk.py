"""The smallest scenario in which compiled decoding still leaves eager decoding."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from hypothesis import HealthCheck, find, settings
from hypothesis import strategies as st
from hypothesis.errors import NoSuchExample

from mlx_audit.checks.located import Location, locate
from mlx_audit.checks.runs import PROMPT
from mlx_audit.checks.scenario import Scenario
from mlx_audit.checks.subject import Subject

USUAL = Scenario(PROMPT, 4)
"""What is run where nothing is known, or nothing differs."""

SECONDS = 10.0
"""After them, nothing new is tried."""

_LARGEST = 64
"""Most tokens of a prompt that are tried, and most steps."""

_SPARE = 16
"""Most slots beyond the tokens."""

_TRIED = 80


def smallest(subject: Subject, known: Scenario | None = None) -> tuple[Scenario, Location | None]:
    """Return the smallest scenario found in which two runs part, and where; the usual one and None if none does.

    Args:
        subject: What to run.
        known: A scenario in which a check failed.
    """
    tried: dict[Scenario, Location] = {}
    end = time.monotonic() + SECONDS

    def part(scenario: Scenario) -> bool:
        # An answer that was given once stays, as Hypothesis wants it.
        if scenario not in tried and time.monotonic() < end:
            tried[scenario] = locate(subject, scenario)
        return scenario in tried and tried[scenario].step is not None

    usual = Scenario(USUAL.prompt, USUAL.steps, dtype=subject.dtype)
    start = next((scenario for scenario in (known, usual) if scenario and part(scenario)), None)
    found = _smallest_of(start or known or usual, part) or start or usual
    return found, tried[found] if part(found) else None


def _smallest_of(start: Scenario, part: Callable[[Scenario], bool]) -> Scenario | None:
    least = replace(start, prompt=1, steps=1, capacity=2, chunk=0)
    if part(least):
        return least
    try:
        return find(_smaller(start), part, settings=_LIMITS)
    except NoSuchExample:
        return None


_LIMITS = settings(
    max_examples=_TRIED,
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)


@st.composite
def _smaller(draw: st.DrawFn, scenario: Scenario) -> Scenario:
    prompt = draw(st.integers(1, min(scenario.prompt, _LARGEST)))
    steps = draw(st.integers(1, max(1, min(scenario.steps, _LARGEST))))
    spare = draw(st.integers(0, _SPARE))
    chunk = draw(st.integers(0, prompt - 1))
    return Scenario(prompt, steps, prompt + steps + spare, chunk, scenario.stream, scenario.dtype)
