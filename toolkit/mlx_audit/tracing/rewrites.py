"""Weights that a forward holds within bounds: written outside the caches, and yet the same at every step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_BOUNDS = frozenset(("AsType", "Maximum", "Minimum", "Broadcast", "Full"))
"""Primitives that hold a value within bounds, or cast it; `Full` makes a bound."""


def only_bounds(events: Sequence[dict[str, Any]], new: str, old: str) -> bool:
    """Return whether `new` is `old` cast or held within constant bounds: doing so again changes nothing more."""
    producers = {
        output[0]: event for event in events if event["type"] == "primitive" for output in event["outputs"]
    }
    constants = {name for event in events if event["type"] == "constants" for name, _ in event["constants"]}
    waiting, reached = [new], False
    while waiting:
        name = waiting.pop()
        if name == old or name in constants:
            reached |= name == old
            continue
        event = producers.get(name)
        if event is None or event["name"] not in _BOUNDS:
            return False
        waiting += [item[0] for item in event["inputs"]]
    return reached
