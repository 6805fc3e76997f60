"""What was run when a check failed, as plain numbers: to be run again, narrowed down and made smaller."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

from mlx_audit.checks.base import CheckFailed
from mlx_audit.checks.runs import teacher_tokens
from mlx_audit.checks.subject import Subject


@dataclass(frozen=True)
class Scenario:
    """A prompt, and forced tokens after it.

    Attributes:
        prompt: Tokens of the prompt.
        steps: Forced tokens after it, one compiled step each.
        capacity: Tokens of the session; by default, just enough.
        chunk: Tokens of a chunk of the prompt; 0 reads it at once.
        stream: Which of the subject's random streams the tokens come from.
        dtype: Of the tiny model.
    """

    prompt: int
    steps: int
    capacity: int = 0
    chunk: int = 0
    stream: int = 0
    dtype: str = "float32"

    @property
    def room(self) -> int:
        """Capacity of the session, in tokens."""
        return max(self.capacity, self.prompt + self.steps)

    @property
    def piece(self) -> int:
        """Tokens of a chunk of the prompt."""
        return self.chunk or self.prompt

    def subject(self, subject: Subject) -> Subject:
        """Return the subject in the scenario's dtype."""
        return subject if subject.dtype == self.dtype else replace(subject, dtype=self.dtype)

    def tokens(self, subject: Subject) -> tuple[list[int], list[int]]:
        """Return the prompt, and the forced tokens."""
        tokens = teacher_tokens(subject, self.prompt + self.steps, stream=self.stream)
        return tokens[: self.prompt], tokens[self.prompt :]

    def figures(self) -> dict[str, Any]:
        """Return the numbers by name."""
        return asdict(self)


@contextmanager
def during(scenario: Scenario) -> Iterator[None]:
    """Give a failure inside the scenario that was running."""
    try:
        yield
    except CheckFailed as failure:
        failure.scenario = failure.scenario or scenario
        raise
