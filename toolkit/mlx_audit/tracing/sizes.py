"""The same graph at every capacity and rung: a threshold on the number of keys would make another one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from mlx_audit.tracing.layout import prime_from
from mlx_audit.tracing.tracer import Event, StepTracer

_ABOVE = ((83, 59), (199, 131), (8200, 5000), (50_000, 20_000), (400_000, 140_000))
"""Capacity and rung, each at least this: below and above the sizes at which code is likely to branch."""


def other_sizes(events: Sequence[Event], ring: int = 0) -> Iterator[tuple[int, int]]:
    """Yield pairs of capacity and rung, prime, above the largest `ring`, and equal to no axis of the graph.

    With sinks, attention has one key more: that number too must be nothing else's.
    """
    taken = {
        size
        for event in events
        if event["type"] == "primitive"
        for item in [*event["inputs"], *event["outputs"]]
        for size in item[1]
    }
    taken |= {size - 1 for size in taken}
    for capacity, rung in _ABOVE:
        lower = prime_from(max(rung, ring + 1), taken)
        yield prime_from(max(capacity, lower + 1), taken | {lower, lower + 1}), lower


def in_symbols(tracer: StepTracer) -> Callable[[Event], Event]:
    """Return a function that writes `capacity` and `rung` for their values wherever an event holds them.

    Sinks make attention one key longer. A choice of the best k keys counts from the end: there `rung - k` is meant.
    """
    names = {
        tracer.capacity: "capacity",
        tracer.rung: "rung",
        tracer.capacity + 1: "capacity+1",
        tracer.rung + 1: "rung+1",
    }
    near = {tracer.rung - k: f"rung-{k}" for k in range(1, tracer.rung // 2)} | names
    chosen: set[str] = set()

    def replaced(value: Any, known: dict[int, str]) -> Any:
        kind = type(value)
        if kind is int or kind is float:
            return known.get(value, value)
        if kind is tuple or kind is list:
            return [replaced(item, known) for item in value]
        return value

    def symbolic(event: Event) -> Event:
        if event["type"] == "constants":
            return event
        chooses = event.get("name") == "ArgPartition" and tracer.rung in event["inputs"][0][1]
        if chooses or (event.get("name") == "Slice" and event["inputs"][0][0] in chosen):
            chosen.update(output[0] for output in event["outputs"] if chooses)
            return {key: replaced(value, near) for key, value in event.items()}
        return {key: replaced(value, names) for key, value in event.items()}

    return symbolic
