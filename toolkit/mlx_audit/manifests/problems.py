"""Problems found in a file, and the error that carries all of them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from mlx_audit.errors import MlxAuditError
from mlx_audit.manifests.files import real


@dataclass(frozen=True, order=True)
class Problem:
    """One mistake at one place; `line` and `column` are 1-based."""

    file: str
    line: int
    column: int
    what: str
    found: str | None = None
    allowed: str | None = None
    fix: str | None = None

    def __str__(self) -> str:
        text = f"{self.file}:{self.line}:{self.column}: {self.what}"
        for label, value in (("found", self.found), ("allowed", self.allowed), ("fix", self.fix)):
            if value is not None:
                text += f"; {label}: {value}"
        return text


class ManifestError(MlxAuditError):
    """A manifest, or a configuration that it names, is wrong; `problems` has every mistake in order of place."""

    def __init__(self, problems: Iterable[Problem]):
        self.problems = sorted(set(problems), key=lambda p: (p.file, p.line, p.column, p.what))
        super().__init__("\n".join(map(str, self.problems)))


def shown(value: object, limit: int = 80) -> str:
    """A value as messages show it: its repr, on one line and not too long."""
    text = (
        repr(value)
        if not isinstance(value, int) or abs(value) < 10**80
        else "a number of more than 80 digits"
    )
    return text if len(text) <= limit else text[: limit - 3] + "..."


def display(path: Path) -> str:
    """A path as messages show it: relative to the working directory where it lies inside."""
    try:
        return str(real(path).relative_to(Path.cwd()))
    except (ValueError, OSError):
        return str(path)
