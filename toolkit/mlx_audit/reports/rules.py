"""What each check is, for tools that explain a finding: read from the checks' source, so that MLX is not loaded."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import mlx_audit

_TITLE = re.compile(r"^([A-Z][A-Za-z ]+):$", re.MULTILINE)
"""A section of a check's docstring."""


@dataclass(frozen=True)
class Rule:
    """A check as its class and docstring say it.

    Attributes:
        symbol: Name of the class, such as `PositionStaysOnDevice`.
        page: The docstring, which `mlx-audit explain CODE` prints.
    """

    code: str
    symbol: str
    page: str

    @property
    def name(self) -> str:
        """What must hold."""
        return self.page.partition("\n")[0]

    @property
    def sections(self) -> dict[str, str]:
        """The rest of the page, by title."""
        parts = _TITLE.split(self.page)[1:]
        return {title: inspect.cleandoc(text) for title, text in zip(parts[::2], parts[1::2], strict=True)}

    @property
    def markdown(self) -> str:
        """The page with titles that Markdown knows."""
        return _TITLE.sub(r"**\1**\n", re.sub(r"^    ", "", self.page, flags=re.MULTILINE))


@cache
def rules() -> Mapping[str, Rule]:
    """Return all checks by code."""
    folder = Path(mlx_audit.__file__).parent / "checks"
    return {rule.code: rule for path in sorted(folder.glob("*.py")) for rule in _rules_of(path)}


def _rules_of(path: Path) -> Iterator[Rule]:
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        page = ast.get_docstring(node) if isinstance(node, ast.ClassDef) else None
        if isinstance(node, ast.ClassDef) and page is not None:
            yield from (Rule(code, node.name, page) for code in _codes(node))


def _codes(node: ast.ClassDef) -> Iterator[str]:
    for statement in node.body:
        if isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Constant):
            named = any(isinstance(target, ast.Name) and target.id == "code" for target in statement.targets)
            if named and isinstance(statement.value.value, str):
                yield statement.value.value
