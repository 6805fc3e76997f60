"""The same graph at every capacity and rung: a threshold on the number of keys would make another one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from mlx_audit.adapters.special.pooled import FixedCapacityPooledCache
from mlx_audit.tracing.layout import prime_from
from mlx_audit.tracing.tracer import Event, StepTracer

_ABOVE = ((83, 59), (199, 131), (8200, 5000), (50_000, 20_000), (400_000, 140_000))
"""Capacity and rung, each at least this: below and above the sizes at which code is likely to branch."""


def other_sizes(tracer: StepTracer, events: Sequence[Event]) -> Iterator[tuple[int, int]]:
    """Yield pairs of capacity and rung, prime, above the largest ring, and equal to no axis of the graph.

    With sinks, attention has one key more: that number too must be nothing else's, nor may those of pooled entries.
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
        lower = _prime_from(tracer, max(rung, tracer.ring + 1), taken)
        of_rung = {lower, lower + 1, *_entries(tracer, lower)}
        yield _prime_from(tracer, max(capacity, lower + 1), taken | of_rung), lower


def _prime_from(tracer: StepTracer, start: int, taken: set[int]) -> int:
    """Return the first prime from `start` on that is not taken, nor are the numbers of entries for so many tokens."""
    size = prime_from(start, taken)
    while not taken.isdisjoint(_entries(tracer, size)):
        size = prime_from(size + 1, taken)
    return size


def _entries(tracer: StepTracer, tokens: int) -> dict[int, str]:
    """Return how many pooled entries, and blocks of them, so many tokens have, each with its formula."""
    pooled = [
        part
        for cache in tracer.step.caches
        for part in cache.parts
        if isinstance(part, FixedCapacityPooledCache)
    ]
    entries = {part.slots_for(tokens): f"/{part.ratio} in blocks of {part.block}" for part in pooled}
    return {part.slots_for(tokens) // part.block: f"/{part.ratio}/{part.block}" for part in pooled} | entries


def in_symbols(tracer: StepTracer) -> Callable[[Event], Event]:
    """Return a function that writes `capacity` and `rung` for their values wherever an event holds them.

    Sinks make attention one key longer. A choice of the best k keys counts from the end: there `rung - k` is meant.
    """
    names = {
        **{size: f"capacity{formula}" for size, formula in _entries(tracer, tracer.capacity).items()},
        **{size: f"rung{formula}" for size, formula in _entries(tracer, tracer.rung).items()},
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
