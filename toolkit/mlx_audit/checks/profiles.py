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
        dtypes: Those that logits are compared in on the main configuration; each costs kernels of its own.
        derandomize: The same examples at every run.
    """

    examples: int
    steps: int
    configurations: int
    sessions: int
    late: tuple[tuple[int, int, int], ...]
    dtypes: tuple[str, ...]
    derandomize: bool


_LATE = ((250, 10, 600), (1100, 2, 1300))
_LATER = (*_LATE, (4090, 8, 4800))
_LATEST = (*_LATER, (9000, 300, 9400))

_TWO = ("float32", "bfloat16")
_ALL = (*_TWO, "float16")

PROFILES: dict[ProfileName, Profile] = {
    "quick": Profile(
        examples=12, steps=16, configurations=3, sessions=6, late=_LATE, dtypes=_TWO, derandomize=True
    ),
    "ci": Profile(
        examples=40, steps=24, configurations=1000, sessions=12, late=_LATER, dtypes=_ALL, derandomize=True
    ),
    "nightly": Profile(
        examples=400, steps=48, configurations=1000, sessions=40, late=_LATEST, dtypes=_ALL, derandomize=False
    ),
}
