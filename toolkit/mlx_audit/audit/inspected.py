"""What `inspect` shows of one configuration; light imports, because the command line imports it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import groupby
from typing import Any

Run = tuple[str, int]
"""A name, and how many equal ones stand in a row."""


@dataclass
class Inspection:
    """One configuration.

    Attributes:
        layers: One label a layer, such as `rotating(window=128, keep=0)`.
        before: Labels of the caches that belong to no layer.
        notes: What the list of layers leaves open.
        sees: Which earlier tokens a cache lets its layer see, by label.
        masks: What the traced step masks attention by, for each kind of cache.
        costs: Figures of `tracing.cost.Cost` at each of CAPACITIES.
        hazards: What differs between traces, or why there is no trace.
    """

    family: str
    variant: str
    configuration: str
    rope: str
    claimed: str | None
    layers: list[str]
    before: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    sees: dict[str, str] = field(default_factory=dict)
    masks: dict[str, str] = field(default_factory=dict)
    costs: list[dict[str, int]] = field(default_factory=list)
    hazards: list[str] = field(default_factory=list)

    def counts(self) -> dict[str, int]:
        """How many entries each label has, those of no layer included, in the order of their first one."""
        return dict(Counter([*self.layers, *self.before]))

    def pattern(self) -> str:
        """Runs of equal layers, and how often they repeat: `(5×rotating, 1×linear) × 8, 2×rotating`.

        A kind that comes with several parameters is given with them.
        """
        kinds = Counter(label.partition("(")[0] for label in set(self.layers))
        names = [kind if kinds[kind := label.partition("(")[0]] == 1 else label for label in self.layers]
        return ", ".join(_repeats([(name, len(list(group))) for name, group in groupby(names)]))

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain data."""
        return {**asdict(self), "pattern": self.pattern(), "counts": self.counts()}


def _repeats(runs: Sequence[Run]) -> list[str]:
    """Put what repeats into brackets: at each place the stretch that covers most, the shorter pattern where equal."""
    found, start = [], 0
    while start < len(runs):
        period, times = max(
            ((period, _times(runs, start, period)) for period in range(1, len(runs) - start + 1)),
            key=lambda item: (item[0] * item[1] if item[1] > 1 else 1, -item[0]),
        )
        text = ", ".join(f"{count}×{name}" for name, count in runs[start : start + period])
        found.append(f"({text}) × {times}" if times > 1 else text)
        start += period * times
    return found


def _times(runs: Sequence[Run], start: int, period: int) -> int:
    pattern, times = runs[start : start + period], 1
    while runs[start + times * period : start + (times + 1) * period] == pattern:
        times += 1
    return times
