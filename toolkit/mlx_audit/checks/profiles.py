"""How much each audit profile does."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

ProfileName = Literal["quick", "ci", "nightly"]


@dataclass(frozen=True)
class Profile:
    """Sizes of one profile.

    Attributes:
        examples: Hypothesis examples a property.
        steps: Teacher-forced steps a run.
        configurations: Most published configurations traced a variant; the rest is named in the summary.
        sessions: Sessions made in a row to see that memory stays flat.
        late: Prompt, steps and capacity of each run at far positions.
        derandomize: The same examples at every run.
    """

    examples: int
    steps: int
    configurations: int
    sessions: int
    late: tuple[tuple[int, int, int], ...]
    derandomize: bool


_LATE = ((250, 10, 600), (1100, 2, 1300))
_LATER = (*_LATE, (4090, 8, 4800))
_LATEST = (*_LATER, (9000, 300, 9400))

PROFILES: dict[ProfileName, Profile] = {
    "quick": Profile(examples=12, steps=16, configurations=3, sessions=6, late=_LATE, derandomize=True),
    "ci": Profile(examples=40, steps=24, configurations=1000, sessions=12, late=_LATER, derandomize=True),
    "nightly": Profile(
        examples=400, steps=48, configurations=1000, sessions=40, late=_LATEST, derandomize=False
    ),
}
