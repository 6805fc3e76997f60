"""The trace proof: the same graph after every history, traced twice in a row after each."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx

from mlx_audit.adapters import ModuleState, parameter_slots
from mlx_audit.caches import handle
from mlx_audit.tracing.graph import Graph
from mlx_audit.tracing.sizes import in_symbols, other_sizes
from mlx_audit.tracing.tracer import Event, StepTracer, bounded, changed_in_place, readable

HISTORIES: tuple[tuple[int, ...], ...] = ((3,), (1,), (5, 4))
"""Chunk lengths of the prefill before each pair of traces."""

LONG_HISTORY = (2000, 1000)
"""Traced once more after this where the graph is small: a threshold on the position shows."""

_LONG_RECURRENT = (200, 100)
"""The same where a state is carried from token to token, which prefill may do one by one."""

_LONG_BELOW = 6_000
"""Events of a graph that is small enough; the trace of a large one takes a good part of a second."""

_MOST_DIFFERENCES = 3

_LAYER = re.compile(r"\.\d+(?=\.)")

_SMALL = 1 << 16
"""Larger parameters are matrices, which no forward updates; following their initializers would take time."""


@dataclass
class TraceProof:
    """What six traces of one step showed."""

    graph: Graph
    """Of the first trace."""
    differences: list[str] = field(default_factory=list)
    """Where a later trace differs from the first, by primitive, constant or attribute; empty in a proof."""
    traces: int = 0


def prove(tracer: StepTracer, histories: Sequence[Sequence[int]] = HISTORIES) -> TraceProof:
    """Trace the step twice in a row after each history and compare all traces with the first.

    Raises:
        TraceFailed, ExportRefused: see `StepTracer.events`.
    """
    first: list[Event] = []
    differences: list[str] = []
    traces = 0
    pristine = ModuleState(tracer.model)
    for chunks in [*histories, *_turning(tracer.ring), _long(tracer)]:
        turns = ("first", "second") if chunks in histories else ("only",)
        if chunks == _long(tracer) and (len(first) > _LONG_BELOW or sum(chunks) > tracer.capacity):
            break
        pristine.restore()
        parameters = {slot.path: slot.container[slot.key] for slot in parameter_slots(tracer.model)}
        kept = [(path, a, handle(a)) for path, a in parameters.items() if a.size <= _SMALL]
        state = tracer.state_after(chunks)
        differences += _written(f"prefill {list(chunks)}", _outside(pristine, parameters))
        differences += _written(f"prefill {list(chunks)}", changed_in_place(kept))
        for turn in turns:
            label = f"{turn} trace after prefill {list(chunks)}"
            if not first:
                tracer.events(state, lambda event: first.append(readable(event)))
                # Now, as long as the module has the parameters that it was traced with.
                graph = tracer.graph(first)
                differences += _written("the step", tracer.written_in_place(first))
            else:
                comparison = _Comparison(first, label)
                tracer.events(state, lambda event, to=comparison: to.receive(readable(event)))  # type: ignore[misc]
                differences += comparison.finish()
            # An equal trace writes what the first one writes; another one is named anyway.
            differences += _written("the step", tracer.written_outside(first))
            differences += [f"the forward tries to read a traced value at {at}" for at in tracer.host_reads]
            traces += 1
    if len(first) <= _LONG_BELOW:
        for capacity, rung in other_sizes(tracer, first):
            pristine.restore()
            differences += _at_size(tracer, capacity, rung, histories[0], first)
            traces += 1
    pristine.restore()
    leaked = [
        f"constant {constant}, used by {graph.consumer(name)}"
        for name, constant in graph.constants.items()
        if constant.leaked
    ]
    named = _grouped(leaked + differences)
    return TraceProof(graph, [_with_consumer(graph, text) for text in named], traces)


def _outside(pristine: ModuleState, parameters: Mapping[str, mx.array]) -> list[str]:
    """Return what was written since, by path, but weights that are only held within bounds."""
    changes = pristine.changes()
    weights = [change for change in changes if change.path in parameters]
    held = bounded([(parameters[change.path], change.new) for change in weights])
    harmless = {change.path for change, within in zip(weights, held, strict=True) if within}
    return [change.path for change in changes if change.path not in harmless]


def _turning(ring: int) -> list[tuple[int, ...]]:
    """Return histories after which the largest ring is just full, and has turned."""
    return [(ring,), (ring + 3, 2)] if ring else []


def _long(tracer: StepTracer) -> tuple[int, ...]:
    recurrent = any(leaf.role == "recurrent" for leaf in tracer.leaves)
    return _LONG_RECURRENT if recurrent else LONG_HISTORY


def _grouped(findings: Sequence[str]) -> list[str]:
    """Return each finding once, layers of the same kind as one, and changed constants before the rest."""
    groups: dict[str, list[str]] = {}
    for text in findings:
        groups.setdefault(_LAYER.sub(".*", text), []).append(text)
    told = [
        same[0] if len(set(same)) == 1 else f"{pattern} ({len(set(same))} places)"
        for pattern, same in groups.items()
    ]
    return sorted(told, key=lambda text: not text.startswith("constant"))


def _at_size(
    tracer: StepTracer, capacity: int, rung: int, history: Sequence[int], first: Sequence[Event]
) -> list[str]:
    """Trace at another capacity and rung; but for these two sizes, the graph must be the same."""
    other = StepTracer(
        tracer.model, tracer.provider, capacity=capacity, rung=rung, batch_size=tracer.batch_size
    )
    symbolic, own = in_symbols(tracer), in_symbols(other)
    comparison = _Comparison([symbolic(event) for event in first], f"capacity {capacity}, rung {rung}")
    other.events(other.state_after(history), lambda event: comparison.receive(own(readable(event))))
    return comparison.finish()


def _written(who: str, paths: Sequence[str]) -> list[str]:
    """Say what a forward kept outside the caches: a compiled step would freeze it, whether or not it shows here."""
    return [f"{who} wrote outside the caches: {path}" for path in paths]


class _Comparison:
    """Compares the events of a later trace with those of the first as they come in."""

    def __init__(self, first: Sequence[Event], label: str) -> None:
        self._first = first
        self._label = label
        self._index = 0
        self._found: list[str] = []
        self._lost = False

    def receive(self, event: Event) -> None:
        """Take the next event, readable."""
        index, self._index = self._index, self._index + 1
        if self._lost or len(self._found) >= _MOST_DIFFERENCES:
            return
        if index >= len(self._first):
            self._lose(f"more primitives, from {event.get('name', event['type'])} on")
            return
        wanted = self._first[index]
        if event != wanted:
            self._differ(wanted, event)

    def finish(self) -> list[str]:
        """Return the differences, each with the trace that showed it."""
        if not self._lost and self._index < len(self._first):
            self._found.append(f"{len(self._first) - self._index} primitives fewer")
        return [f"{text} ({self._label})" for text in self._found]

    def _differ(self, wanted: Event, event: Event) -> None:
        if event["type"] != wanted["type"]:
            self._lose(f"{wanted['type']} became {event['type']}")
        elif event["type"] == "constants":
            self._constants(wanted["constants"], event["constants"])
        elif event["type"] != "primitive":
            self._lose(f"the {event['type']} changed form")
        elif event["name"] != wanted["name"]:
            self._lose(f"primitive {wanted['name']} became {event['name']}")
        elif event["arguments"] != wanted["arguments"]:
            at = f"%{wanted['outputs'][0][0]}%"
            self._found.append(
                f"{event['name']} arguments {wanted['arguments']} became {event['arguments']}{at}"
            )
        else:
            self._lose(f"{event['name']} reads or makes other arrays")

    def _constants(self, wanted: list[Any], found: list[Any]) -> None:
        for (name, old), (_, new) in zip(wanted, found, strict=False):
            if old != new and len(self._found) < _MOST_DIFFERENCES:
                self._found.append(f"constant {old} became {new}%{name}%")
        if len(wanted) != len(found):
            self._lose(f"{len(wanted)} constants became {len(found)}")

    def _lose(self, text: str) -> None:
        """Note a difference after which the two traces cannot be aligned any more."""
        self._found.append(text)
        self._lost = True


def _with_consumer(graph: Graph, text: str) -> str:
    """Replace the name of a value between percent signs by what uses it."""
    head, *rest = text.split("%")
    if len(rest) != 2:
        return text
    return f"{head}, used by {graph.consumer(rest[0])}{rest[1]}"
