"""From a manifest's expressions to Python over `args`, as tokens that a layout can break into lines.

Nothing of a manifest reaches the text as it is: names must be identifiers, strings are written by `repr`, and operators
are those of a table.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from keyword import iskeyword
from typing import Literal as OneOf

from mlx_audit.errors import MlxAuditError
from mlx_audit.manifests.evaluation import evaluate
from mlx_audit.manifests.syntax import Binary, Expression, Index, Length, Literal, Name, Node, Unary

COMMA, LOGIC, COMPARISON, SUM, TERM, UNARY, ATOM = 18, 14, 10, 5, 4, 2, 0
"""How loosely operators bind, by the numbers of black; the loosest one is where a line is broken."""

_BINDING = {
    **dict.fromkeys(("==", "!=", "<", "<=", ">", ">=", "in", "not in", "is", "is not"), COMPARISON),
    **dict.fromkeys(("+", "-"), SUM),
    **dict.fromkeys(("//", "%"), TERM),
}
_OR, _AND, _NOT = 17, 16, 15
"""Finer than LOGIC: these three bind differently, but lines are broken at `and` and `or` alike."""

_NEGATED = {"==": "!=", "!=": "==", "in": "not in", "not in": "in"}


@dataclass(frozen=True)
class Token:
    """A piece of a line.

    Attributes:
        text: With the spaces around it.
        kind: `open` and `close` are brackets, `index` closes a subscript; an operator is one between two operands.
        binding: Of an operator or comma.
    """

    text: str
    kind: OneOf["text", "operator", "open", "close", "index"] = "text"
    binding: int = ATOM


def tokens_of(expression: Expression) -> list[Token]:
    """Return an expression as Python over `args`; ExpressionError where it can have no value."""
    return list(_tokens(_folded(expression.root), 99))


def uses(expression: Expression, name: str) -> bool:
    """Return whether a name is left when all that is constant has been computed."""
    return name in Expression("", _folded(expression.root)).names


def needs_arguments(expression: Expression) -> bool:
    """Return whether any field of the arguments is left when all that is constant has been computed."""
    return bool(set(Expression("", _folded(expression.root)).names) - {"i"})


def attribute_path(path: str) -> str:
    """Return a dotted path of attributes, or refuse what would be no Python."""
    for name in path.split("."):
        _identifier(name)
    return path


def call(function: str, arguments: list[list[Token]]) -> list[Token]:
    """Return a call."""
    found = [Token(f"{function}(", "open")]
    for number, argument in enumerate(arguments):
        found += [Token(", ", "operator", COMMA)] if number else []
        found += argument
    return [*found, Token(")", "close")]


def _folded(node: Node) -> Node:
    """Return the tree with everything constant computed; Python would warn of `5[0]`, and compare across types."""
    if not Expression("", node).names:
        value = evaluate(Expression("", node), {})
        assert value is None or isinstance(value, int | str | tuple)
        return Literal(node.column, value)
    match node:
        case Length():
            return Length(node.column, _folded(node.operand))
        case Index():
            return Index(node.column, _folded(node.base), _folded(node.index))
        case Unary(operator="not", operand=Unary(operator="not", operand=inner)):
            return _folded(inner)
        case Unary(operator="not", operand=Binary() as inner) if inner.operator in _NEGATED:
            return _folded(Binary(inner.column, _NEGATED[inner.operator], inner.left, inner.right))
        case Unary():
            return Unary(node.column, node.operator, _folded(node.operand))
        case Binary():
            return Binary(node.column, node.operator, _folded(node.left), _folded(node.right))
    return node


def _tokens(node: Node, allowed: int) -> Iterator[Token]:
    """Yield the tokens of a node, in parentheses where it binds more loosely than its place allows."""
    binding, inner = _written(node)
    if binding > allowed:
        yield Token("(", "open")
        yield from inner
        yield Token(")", "close")
    else:
        yield from inner


def _written(node: Node) -> tuple[int, list[Token]]:
    match node:
        case Literal():
            return (UNARY if _is_negative(node.value) else ATOM), list(_literal(node.value))
        case Name():
            return ATOM, [Token(node.name if node.name == "i" else f"args.{_identifier(node.name)}")]
        case Length():
            return ATOM, call("len", [list(_tokens(node.operand, 99))])
        case Index():
            index = [*_tokens(node.index, 99), Token("]", "index")]
            return ATOM, [*_tokens(node.base, ATOM), Token("[", "open"), *index]
        case Unary(operator="not"):
            return _NOT, [Token("not "), *_tokens(node.operand, _NOT)]
        case Unary():
            return UNARY, [Token("-"), *_tokens(node.operand, UNARY)]
        case Binary(operator="and" | "or" as operator):
            binding = _AND if operator == "and" else _OR
            between = Token(f" {operator} ", "operator", LOGIC)
            return binding, [*_tokens(node.left, binding), between, *_tokens(node.right, binding - 1)]
        case Binary():
            return _binary(node)
    raise AssertionError(node)


def _binary(node: Binary) -> tuple[int, list[Token]]:
    operator = node.operator
    if operator in ("==", "!=") and (_is_singleton(node.left) or _is_singleton(node.right)):
        operator = "is" if operator == "==" else "is not"
        if _is_singleton(node.left):
            node = Binary(node.column, operator, node.right, node.left)
    binding = _BINDING[operator]
    # Comparisons are not chained, and the right side of a difference needs parentheses for another one.
    left = _tokens(node.left, binding - 1 if binding == COMPARISON else binding)
    return binding, [*left, Token(f" {operator} ", "operator", binding), *_tokens(node.right, binding - 1)]


def _literal(value: object) -> Iterator[Token]:
    if isinstance(value, tuple):
        yield Token("[", "open")
        for number, item in enumerate(value):
            if number:
                yield Token(", ", "operator", COMMA)
            yield from _literal(item)
        yield Token("]", "close")
    elif isinstance(value, str):
        yield Token(_quoted(value))
    else:
        assert value is None or isinstance(value, int)
        yield Token(repr(value))


def _quoted(value: str) -> str:
    """Return a string in double quotes where that needs no more escapes, as black has it."""
    text = repr(value)
    return text if '"' in text else f'"{text[1:-1]}"'


def _identifier(name: str) -> str:
    if not (name.isascii() and name.isidentifier()) or iskeyword(name) or name.startswith("_"):
        raise MlxAuditError("no name of an attribute in Python", found=repr(name))
    return name


def _is_singleton(node: Node) -> bool:
    return isinstance(node, Literal) and (node.value is None or isinstance(node.value, bool))


def _is_negative(value: object) -> bool:
    return isinstance(value, int) and value < 0
