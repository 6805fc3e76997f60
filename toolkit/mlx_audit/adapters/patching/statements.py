"""Statements that are recognized by what they say, and written anew."""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from textwrap import dedent
from typing import TypeVar, cast

import libcst as cst

from mlx_audit.adapters.patching.code import Change, walk

Node = TypeVar("Node", bound=cst.CSTNode)

_PLAIN = cst.Module([])

LINE = 88
"""Columns, as mlx-lm's formatter allows."""


def said(*nodes: cst.CSTNode) -> str:
    """Return statements as text that is the same for any layout and any comments."""
    return "\n".join(ast.unparse(ast.parse(_PLAIN.code_for_node(node))) for node in nodes)


def normal(source: str) -> str:
    """Return the text that `said` gives for this source."""
    return ast.unparse(ast.parse(dedent(source)))


def written(source: str, first: cst.CSTNode | None = None) -> list[cst.BaseStatement]:
    """Return a source as statements; the blank lines and comments before `first` stay before them."""
    # A comment on the first line of a module belongs to the module, not to its first statement.
    module = cst.parse_module(f"pass\n{dedent(source).strip()}\n")
    blank = [node for node in walk(module) if isinstance(node, cst.EmptyLine) and not node.comment]
    module = exchanged(module, {line: cst.EmptyLine(indent=False) for line in blank})
    body: list[cst.BaseStatement] = [*module.body[1:]]
    leading = getattr(first, "leading_lines", ())
    if leading:
        body[0] = body[0].with_changes(leading_lines=[*leading, *body[0].leading_lines])  # type: ignore[attr-defined]
    return body


def only(node: cst.CSTNode, source: str) -> list[cst.BaseStatement]:
    """Return the one run of statements, at any depth, that says what `source` says; nothing if there is another."""
    wanted = normal(source)
    count = len(ast.parse(wanted).body)
    runs = [
        body[at : at + count]
        for body in map(block, walk(node))
        for at in range(len(body) - count + 1)
        if said(*body[at : at + count]) == wanted
    ]
    return runs[0] if len(runs) == 1 else []


def edits(node: cst.CSTNode, pairs: Sequence[tuple[str, str]]) -> dict[cst.CSTNode, Change]:
    """Return what exchanges runs of statements for others, by what they say; nothing unless each is there once.

    Args:
        node: What they are in, at any depth.
        pairs: Source of consecutive statements, and source of what takes their place.
    """
    changes: dict[cst.CSTNode, Change] = {}
    for before, after in pairs:
        found = only(node, before)
        if not found:
            return {}
        first, *others = found
        changes[first] = cst.FlattenSentinel(written(after, first))
        changes |= {line: cst.RemoveFromParent() for line in others}
    return changes


def block(node: cst.CSTNode) -> list[cst.BaseStatement]:
    """Return the statements in an indented block; none of anything else."""
    body = node.body if isinstance(node, cst.IndentedBlock) else ()
    return [statement for statement in body if isinstance(statement, cst.BaseStatement)]


def indentation(node: cst.CSTNode, parents: Mapping[cst.CSTNode, cst.CSTNode]) -> int:
    """Return the column at which a statement begins."""
    depth = 0
    while node in parents:
        node = parents[node]
        depth += isinstance(node, cst.IndentedBlock)
    return 4 * depth


def fitted(statement: cst.BaseStatement, column: int) -> cst.BaseStatement:
    """Return a statement that now begins at `column`, with sums broken that have a line of their own in a call."""
    changes: dict[cst.CSTNode, cst.CSTNode] = {}
    for call in walk(statement):
        match call:
            case cst.Call(
                args=[cst.Arg(value=cst.BinaryOperation() as sum_)],
                whitespace_before_args=cst.ParenthesizedWhitespace() as newline,
            ) if column + len(newline.last_line.value) + len(_PLAIN.code_for_node(sum_)) > LINE:
                broken = sum_.operator.with_changes(whitespace_before=newline)
                changes[sum_] = sum_.with_changes(operator=broken)
    return exchanged(statement, changes)


def exchanged(node: Node, changes: Mapping[cst.CSTNode, cst.CSTNode]) -> Node:
    """Return a piece of a tree with nodes in it exchanged."""
    return cast(Node, node.visit(_Exchange(changes)))


class _Exchange(cst.CSTTransformer):
    def __init__(self, changes: Mapping[cst.CSTNode, cst.CSTNode]) -> None:
        super().__init__()
        self.changes = changes

    def on_leave(self, original_node: cst.CSTNodeT, updated_node: cst.CSTNodeT) -> object:  # type: ignore[override]
        return self.changes.get(original_node, updated_node)
