"""Weights that a forward holds within bounds: written outside the caches, and yet the same at every step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_MAKES_BOUNDS = frozenset(("Broadcast", "Full"))
_BOUNDS = _MAKES_BOUNDS | {"AsType", "Maximum", "Minimum"}
"""Primitives that hold a value within bounds, or cast it, or make a bound."""


class Bounds:
    """Tells which values of a graph are others within bounds.

    Args:
        events: All events of MLX's exporter.
    """

    def __init__(self, events: Sequence[dict[str, Any]]) -> None:
        self._producers = {
            output[0]: event
            for event in events
            if event["type"] == "primitive"
            for output in event["outputs"]
        }
        self._constants = {
            item[0] for event in events if event["type"] == "constants" for item in event["constants"]
        }
        self._readers: dict[str, list[dict[str, Any]]] = {}
        for event in events:
            for item in event["inputs"] if event["type"] == "primitive" else ():
                self._readers.setdefault(item[0], []).append(event)

    def hold(self, new: str, old: str) -> bool:
        """Return whether `new` is `old` cast or held within constant bounds: to do so again changes nothing more.

        Nothing else may read `old`: a forward that first uses a weight and then holds it within bounds uses another one
        at its next token, and a compiled step, which writes no weight, never does.
        """
        waiting, reached, within = [new], False, list[dict[str, Any]]()
        while waiting:
            name = waiting.pop()
            if name == old or name in self._constants:
                reached |= name == old
                continue
            event = self._producers.get(name)
            if event is None or event["name"] not in _BOUNDS:
                return False
            within.append(event)
            waiting += [item[0] for item in event["inputs"]]
        return reached and self._read_only_by(within, old, new)

    def _read_only_by(self, within: Sequence[dict[str, Any]], old: str, new: str) -> bool:
        made = {event["outputs"][0][0] for event in within if event["name"] not in _MAKES_BOUNDS}
        known = [id(event) for event in within]
        return all(
            id(event) in known for name in (made | {old}) - {new} for event in self._readers.get(name, ())
        )
