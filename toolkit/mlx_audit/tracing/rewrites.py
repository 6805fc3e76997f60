"""Weights that a forward holds within bounds: written outside the caches, and yet the same at every step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_BOUNDS = frozenset(("AsType", "Maximum", "Minimum", "Broadcast", "Full"))
"""Primitives that hold a value within bounds, or cast it; `Full` makes a bound."""


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

    def hold(self, new: str, old: str) -> bool:
        """Return whether `new` is `old` cast or held within constant bounds: to do so again changes nothing more."""
        waiting, reached = [new], False
        while waiting:
            name = waiting.pop()
            if name == old or name in self._constants:
                reached |= name == old
                continue
            event = self._producers.get(name)
            if event is None or event["name"] not in _BOUNDS:
                return False
            waiting += [item[0] for item in event["inputs"]]
        return reached
