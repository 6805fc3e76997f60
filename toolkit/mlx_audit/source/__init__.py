"""Placeholder by the lead until part A is written (so that imports work); part A replaces this file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Consumer:
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
    def place(self) -> str:
        """`mlx_lm/models/llama4.py:118:20`; a user's own file by its name (the lead's code uses this: keep it)."""
        parts = self.file.parts
        name = "/".join(parts[parts.index("mlx_lm") :]) if "mlx_lm" in parts else self.file.name
        return f"{name}:{self.line}:{self.column}"


@dataclass(frozen=True)
class SourceReport:
    file: Path
    consumers: tuple[Consumer, ...]
    unreadable: str = ""
    notes: tuple[str, ...] = ()

    @property
    def hazards(self) -> tuple[Consumer, ...]:
        return tuple(c for c in self.consumers if c.code)

    @property
    def safe(self) -> tuple[Consumer, ...]:
        return tuple(c for c in self.consumers if not c.code)


def read_source(file: Path, overlay: Mapping[str, Path] = {}) -> SourceReport:
    return SourceReport(file, ())
