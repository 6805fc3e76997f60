"""What a call passes."""

from __future__ import annotations

from dataclasses import dataclass

from mlx_audit.source.tags import Tags, union
from mlx_audit.source.values import Value


@dataclass(frozen=True, slots=True)
class Arguments:
    """What a call passes. `rest` stands for positional arguments of which the number is unknown."""

    positional: tuple[Value, ...] = ()
    keywords: tuple[tuple[str, Value], ...] = ()
    rest: Value | None = None
    others: Value | None = None

    def tags(self) -> Tags:
        """Return all that goes in."""
        return union(value.all_tags() for value in self.values())

    def values(self) -> tuple[Value, ...]:
        """Return all arguments."""
        more = [value for value in (self.rest, self.others) if value is not None]
        return (*self.positional, *(value for _, value in self.keywords), *more)
