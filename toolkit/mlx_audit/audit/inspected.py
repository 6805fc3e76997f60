"""What `inspect` shows of one configuration; light imports, because the command line imports it."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, field
from itertools import groupby
from typing import Any


@dataclass
class Inspection:
    """One configuration.

    Attributes:
        layers: One label a layer, such as `rotating(window=128, keep=0)`.
        costs: Figures of `tracing.cost.Cost` at each of CAPACITIES.
        hazards: What differs between traces, or why there is no trace.
    """

    family: str
    variant: str
    configuration: str
    rope: str
    claimed: str | None
    layers: list[str]
    costs: list[dict[str, int]] = field(default_factory=list)
    hazards: list[str] = field(default_factory=list)

    def counts(self) -> dict[str, int]:
        """How many layers each label has, in the order of their first layer."""
        return dict(Counter(self.layers))

    def pattern(self) -> str:
        """Runs of equal layers, and how often they repeat: `(5 rotating, 1 linear) × 8`."""
        runs = [(label.partition("(")[0], len(list(group))) for label, group in groupby(self.layers)]
        for period in range(1, len(runs) // 2 + 1):
            if len(runs) % period == 0 and runs == runs[:period] * (len(runs) // period):
                return f"({_runs(runs[:period])}) × {len(runs) // period}"
        return _runs(runs)

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain data."""
        return asdict(self)


def _runs(runs: list[tuple[str, int]]) -> str:
    return ", ".join(f"{count} {kind}" for kind, count in runs)
