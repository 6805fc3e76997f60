"""What reading a model's source says: the places that consume the position, and what could not be read."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Consumer:
    """One place where the position, or what stands for it, is consumed.

    Attributes:
        code: Empty where it is graph-safe, else the code of the check that it breaks.
        kind: Short name of the mechanism, such as `rope offset` or `arange bound`.
        file: Where it is; `line` and `column` count from 1.
        symbol: The function around it, such as `GPTBigCodeModel.__call__`.
        what: One sentence that names the expression.
        when: The condition under which the place is reached, as source text; empty if always.
        needs: Full names of the classes one of which must be instantiated for the place to be reached.
    """

    code: str
    kind: str
    file: Path
    line: int
    column: int
    symbol: str
    what: str
    when: str = ""
    needs: tuple[str, ...] = ()

    @property
    def where(self) -> str:
        """The place for people: `mlx_lm/models/llama4.py:118:20`; a user's own file by its name."""
        parts = self.file.parts
        name = "/".join(parts[parts.index("mlx_lm") :]) if "mlx_lm" in parts else self.file.name
        return f"{name}:{self.line}:{self.column}"

    @property
    def place(self) -> tuple[str, int, int, str, str]:
        """The key by which consumers are sorted, and told apart."""
        return str(self.file), self.line, self.column, self.code, self.kind


@dataclass(frozen=True)
class SourceReport:
    """What was read in one model file, and in what it reaches.

    Attributes:
        unreadable: Why the file could not be read, or not to its end; such a file is never clean.
        notes: What could not be followed.
    """

    file: Path
    consumers: tuple[Consumer, ...] = ()
    unreadable: str = ""
    notes: tuple[str, ...] = ()

    @property
    def hazards(self) -> tuple[Consumer, ...]:
        """The consumers that break a check."""
        return tuple(consumer for consumer in self.consumers if consumer.code)

    @property
    def safe(self) -> tuple[Consumer, ...]:
        """The consumers that stay in the graph."""
        return tuple(consumer for consumer in self.consumers if not consumer.code)
