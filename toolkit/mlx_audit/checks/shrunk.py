"""The smallest scenario in which compiled decoding still leaves eager decoding."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from random import Random

from hypothesis import HealthCheck, Phase, find, settings
from hypothesis import strategies as st
from hypothesis.database import InMemoryExampleDatabase, choices_to_bytes
from hypothesis.errors import NoSuchExample

from mlx_audit.checks.located import Location, locate
from mlx_audit.checks.runs import PROMPT
from mlx_audit.checks.scenario import Scenario
from mlx_audit.checks.subject import Subject

USUAL = Scenario(PROMPT, 4)
"""What is run where nothing is known, or nothing differs."""

SECONDS = 10.0
"""Processor seconds after which nothing new is tried; a busy machine changes nothing of what is found."""

_SPARE = 16
"""Most slots beyond the tokens; one is best, so that what is written one slot late stays in the buffer."""

_DRAWN = 15
"""Scenarios that are tried where none is known to fail."""


def smallest(subject: Subject, known: Scenario | None = None) -> tuple[Scenario, Location | None]:
    """Return the smallest scenario found in which two runs part, and where; the usual one and None if none does.

    Args:
        subject: What to run.
        known: A scenario in which a check failed.
    """
    tried: dict[Scenario, Location] = {}
    end = time.process_time() + SECONDS

    def part(scenario: Scenario) -> bool:
        # An answer that was given once stays, as Hypothesis wants it.
        if scenario not in tried and time.process_time() < end:
            tried[scenario] = locate(subject, scenario)
        return scenario in tried and tried[scenario].step is not None

    usual = Scenario(USUAL.prompt, USUAL.steps, dtype=subject.dtype)
    start = next((scenario for scenario in (known, usual) if scenario and part(scenario)), None)
    found = _found(start or usual, start is not None, part) or usual
    return found, tried[found] if part(found) else None


def _found(start: Scenario, fails: bool, part: Callable[[Scenario], bool]) -> Scenario | None:
    """Return the smallest scenario that Hypothesis comes to: from a failing one, or else from drawn ones."""
    least = replace(start, prompt=1, steps=1, capacity=3, chunk=0)
    if part(least):
        return least
    database = InMemoryExampleDatabase()
    spare = start.room - start.prompt - start.steps
    # The failing scenario as an example to begin with: the numbers that `_smaller` draws, in its order.
    spares = [1, 0, *range(2, max(spare, _SPARE) + 1)]
    choices = (start.prompt, start.steps, spares.index(spare), start.chunk % start.prompt)
    database.save(_KEY, choices_to_bytes(choices))
    limits = settings(
        max_examples=_DRAWN,
        phases=(Phase.reuse, Phase.generate, Phase.shrink),
        database=database,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    try:
        return find(_smaller(start, spares), part, settings=limits, random=Random(0), database_key=_KEY)
    except NoSuchExample:
        return start if fails else None


_KEY = b"mlx-audit"


@st.composite
def _smaller(draw: st.DrawFn, start: Scenario, spares: list[int]) -> Scenario:
    prompt = draw(st.integers(1, start.prompt))
    steps = draw(st.integers(1, start.steps))
    spare = draw(st.sampled_from(spares))
    chunk = draw(st.integers(0, prompt - 1))
    return Scenario(prompt, steps, prompt + steps + spare, chunk, start.stream, start.dtype)
