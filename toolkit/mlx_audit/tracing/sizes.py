"""The same graph at every capacity and rung: a threshold on the number of keys would make another one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import count
from typing import Any

from mlx_audit.tracing.tracer import Event, StepTracer

_ABOVE = ((83, 59), (199, 131), (8200, 5000))
"""Capacity and rung, each at least this: below and above the sizes at which code is likely to branch."""


def other_sizes(events: Sequence[Event]) -> Iterator[tuple[int, int]]:
    """Yield pairs of capacity and rung, prime, and equal to no axis of the graph."""
    taken = {
        size
        for event in events
        if event["type"] == "primitive"
        for item in [*event["inputs"], *event["outputs"]]
        for size in item[1]
    }
    for capacity, rung in _ABOVE:
        chosen = _prime_from(capacity, taken)
        yield chosen, _prime_from(rung, taken | {chosen})


def in_symbols(tracer: StepTracer) -> Callable[[Event], Event]:
    """Return a function that writes `capacity` and `rung` for their values wherever an event holds them."""
    names = {tracer.capacity: "capacity", tracer.rung: "rung"}

    def replaced(value: Any) -> Any:
        kind = type(value)
        if kind is int or kind is float:
            return names.get(value, value)
        if kind is tuple or kind is list:
            return [replaced(item) for item in value]
        return value

    def symbolic(event: Event) -> Event:
        if event["type"] == "constants":
            return event
        return {key: replaced(value) for key, value in event.items()}

    return symbolic


def _prime_from(start: int, taken: set[int]) -> int:
    return next(n for n in count(start) if n not in taken and all(n % d for d in range(2, int(n**0.5) + 1)))
