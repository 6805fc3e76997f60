"""The syntax tree of expressions, and the error of everything that reads or evaluates them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from mlx_audit.errors import MlxAuditError
from mlx_audit.manifests.suggestions import did_you_mean


class ExpressionError(MlxAuditError):
    """An expression that cannot be read, or cannot be evaluated on these arguments.

    `column` is the 1-based column in the expression's own text.
    """

    def __init__(
        self, what: str, column: int, *, found: object = None, allowed: object = None, fix: str | None = None
    ):
        super().__init__(what, where=f"column {column}", found=found, allowed=allowed, fix=fix)
        self.column = column


@dataclass(frozen=True)
class Node:
    """A part of an expression; `column` is 1-based and only for messages."""

    column: int = field(compare=False)


@dataclass(frozen=True)
class Literal(Node):
    """An integer, string, true, false, none, or a list of these."""

    value: int | str | bool | tuple[object, ...] | None


@dataclass(frozen=True)
class Name(Node):
    """A field of the arguments, or `i`."""

    name: str


@dataclass(frozen=True)
class Index(Node):
    """`base[index]`."""

    base: Node
    index: Node


@dataclass(frozen=True)
class Length(Node):
    """`len(operand)`."""

    operand: Node


@dataclass(frozen=True)
class Unary(Node):
    """`not operand` or `-operand`."""

    operator: str
    operand: Node


@dataclass(frozen=True)
class Binary(Node):
    """`left operator right`."""

    operator: str
    left: Node
    right: Node


@dataclass(frozen=True)
class Expression:
    """A parsed expression together with its text."""

    text: str
    root: Node = field(compare=False)

    @property
    def names(self) -> dict[str, int]:
        """Every name used, with the column of its first use."""
        found: dict[str, int] = {}
        for node in _walk(self.root):
            if isinstance(node, Name):
                found.setdefault(node.name, node.column)
        return found

    def __str__(self) -> str:
        return self.text


def _walk(node: Node) -> Iterator[Node]:
    yield node
    for part in ("base", "index", "operand", "left", "right"):
        child = getattr(node, part, None)
        if isinstance(child, Node):
            yield from _walk(child)


def unknown_name(name: str, column: int, known: list[str]) -> ExpressionError:
    """The error for a name that nothing defines."""
    return ExpressionError("unknown name", column, found=name, fix=did_you_mean(name, known))
