"""Reading and replacing pieces of a libcst tree."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import fields
from functools import cache, lru_cache

import libcst as cst

Change = cst.CSTNode | cst.RemovalSentinel | cst.FlattenSentinel[cst.CSTNode]
Parents = Mapping[cst.CSTNode, cst.CSTNode]

_PLAIN = cst.Module([])


def text(node: cst.CSTNode) -> str:
    """Return an expression as text that is the same for any layout of it."""
    code = _PLAIN.code_for_node(node)
    try:
        return ast.unparse(ast.parse(f"({code}\n)", mode="eval"))
    except SyntaxError:  # an argument, or a statement
        return code.strip()


def walk(node: cst.CSTNode) -> Iterator[cst.CSTNode]:
    """Yield a node and all below it but spaces, statements in the order of the source."""
    todo = [node]
    while todo:
        node = todo.pop()
        yield node
        todo.extend(reversed(children(node)))


def children(node: cst.CSTNode) -> list[cst.CSTNode]:
    """Return what a node consists of; `node.children` rebuilds the node for it."""
    found: list[cst.CSTNode] = []
    for name in _parts(type(node)):
        part = getattr(node, name)
        if isinstance(part, cst.CSTNode):
            found.append(part)
        elif isinstance(part, list | tuple):
            found.extend(part)
    return found


@cache
def _parts(kind: type[cst.CSTNode]) -> tuple[str, ...]:
    return tuple(part.name for part in fields(kind) if not part.name.startswith("whitespace"))


@lru_cache(maxsize=1)
def parents(root: cst.CSTNode) -> Parents:
    """Return the parent of each node below a root; trees are never changed, and a walk through a large one is slow."""
    return {child: node for node in walk(root) for child in children(node)}


def functions(tree: cst.CSTNode) -> list[cst.FunctionDef]:
    """Return the functions and methods that have no function inside, so that their names mean one thing."""
    found = [node for node in walk(tree) if isinstance(node, cst.FunctionDef)]
    return [
        function
        for function in found
        if not any(isinstance(node, cst.FunctionDef | cst.ClassDef) for node in list(walk(function))[1:])
    ]


def stores(node: cst.CSTNode) -> list[tuple[str, cst.BaseExpression | None]]:
    """Return each binding of a name in a function or a statement, in order, with the value of a plain assignment."""
    found: list[tuple[str, cst.BaseExpression | None]] = []
    for each in walk(node):
        match each:
            case cst.Assign(targets=targets, value=value):
                for target in targets:
                    found += _bound(target.target, value)
            case cst.AnnAssign(target=target, value=value):
                found += _bound(target, value)
            case cst.AugAssign(target=target) | cst.NamedExpr(target=target):
                found += _bound(target, None)
            case cst.For(target=target) | cst.CompFor(target=target) | cst.AsName(name=target):
                found += _bound(target, None)
    return found


def names(value: cst.CSTNode) -> set[str]:
    """Return every identifier in an expression."""
    return {node.value for node in walk(value) if isinstance(node, cst.Name)}


def replaced(tree: cst.Module, changes: Mapping[cst.CSTNode, Change]) -> cst.Module:
    """Return the module with nodes exchanged, or the module itself if there are none to exchange."""
    if not changes:
        return tree
    changed = tree.visit(_Exchange(changes))
    assert isinstance(changed, cst.Module)
    return changed


def _bound(
    target: cst.CSTNode, value: cst.BaseExpression | None
) -> list[tuple[str, cst.BaseExpression | None]]:
    if isinstance(target, cst.Name):
        return [(target.value, value)]
    if isinstance(target, cst.Tuple | cst.List):
        return [(name, None) for name in sorted(names(target))]
    return []


class _Exchange(cst.CSTTransformer):
    def __init__(self, changes: Mapping[cst.CSTNode, Change]) -> None:
        super().__init__()
        self.changes = changes

    def on_leave(self, original_node: cst.CSTNodeT, updated_node: cst.CSTNodeT) -> object:  # type: ignore[override]
        return self.changes.get(original_node, updated_node)
