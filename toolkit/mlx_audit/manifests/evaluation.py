"""Evaluation of expressions: strict about types, bounded, and without any reach into Python objects.

There is no implicit truth (a condition is a boolean), no comparison across types (`none` may be compared with
anything), and no negative index.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import NoReturn

from mlx_audit.manifests.expressions import MAX_INTEGER
from mlx_audit.manifests.syntax import (
    Binary,
    Expression,
    ExpressionError,
    Index,
    Length,
    Literal,
    Name,
    Node,
    Unary,
    unknown_name,
)

Names = Mapping[str, object]


def names_of(arguments: object) -> dict[str, object]:
    """The values that an expression may name: entries of a mapping, or fields and attributes of an arguments object."""
    if isinstance(arguments, Mapping):
        return {key: value for key, value in arguments.items() if isinstance(key, str)}
    values = dict(getattr(arguments, "__dict__", {}))
    if is_dataclass(arguments):
        values |= {field.name: getattr(arguments, field.name) for field in fields(arguments)}
    return values


def evaluate(expression: Expression, names: Names) -> object:
    """The value of an expression: int, bool, str, None, or whatever value a name has."""
    return _value(expression.root, names)


def evaluate_condition(expression: Expression, names: Names) -> bool:
    """The value of a `when`."""
    value = evaluate(expression, names)
    if not isinstance(value, bool):
        _refuse(expression.root, "the condition is neither true nor false", value, "a comparison")
    return value


def evaluate_integer(expression: Expression, names: Names) -> int:
    """The value of a count or of a cache parameter: an integer, not negative."""
    value = evaluate(expression, names)
    if not _is_integer(value) or value < 0:  # type: ignore[operator]
        _refuse(expression.root, "not a count", value, "an integer, 0 or more")
    return value  # type: ignore[return-value]


def _value(node: Node, names: Names) -> object:
    match node:
        case Literal():
            return node.value
        case Name():
            if node.name not in names:
                raise unknown_name(node.name, node.column, list(names))
            return names[node.name]
        case Length():
            operand = _value(node.operand, names)
            if not isinstance(operand, str | Sequence | Mapping):
                _refuse(node, "len of a value that has no length", operand, "a list, string or mapping")
            return len(operand)
        case Index():
            return _item(node, _value(node.base, names), _value(node.index, names))
        case Unary():
            return _unary(node, _value(node.operand, names))
        case Binary() if node.operator in ("and", "or"):
            left = _boolean(node.left, names)
            return left if left == (node.operator == "or") else _boolean(node.right, names)
        case Binary():
            return _binary(node, _value(node.left, names), _value(node.right, names))
    raise AssertionError(node)


def _item(node: Index, base: object, index: object) -> object:
    if isinstance(base, Mapping):
        if not isinstance(index, str) or index not in base:
            _refuse(node, "the mapping has no such key", index, sorted(map(str, base))[:20])
        return base[index]
    if not isinstance(base, str | Sequence):
        _refuse(node, "a value that cannot be indexed", base, "a list, string or mapping")
    if not isinstance(index, int) or isinstance(index, bool):
        _refuse(node, "the index is not an integer", index, "an integer")
    if not 0 <= index < len(base):
        _refuse(
            node, "the index is out of range", index, f"0 to {len(base) - 1}" if base else "the list is empty"
        )
    return base[index]


def _unary(node: Unary, operand: object) -> object:
    if node.operator == "not":
        if not isinstance(operand, bool):
            _refuse(node, "`not` of a value that is neither true nor false", operand, "true or false")
        return not operand
    return _bounded(node, -_integer(node, operand))


def _boolean(node: Node, names: Names) -> bool:
    value = _value(node, names)
    if not isinstance(value, bool):
        _refuse(node, "a side of `and` or `or` is neither true nor false", value, "true or false")
    return value


def _binary(node: Binary, left: object, right: object) -> object:
    match node.operator:
        case "==":
            return _equal(node, left, right)
        case "!=":
            return not _equal(node, left, right)
        case "in":
            return _contains(node, left, right)
        case "not in":
            return not _contains(node, left, right)
        case "<" | "<=" | ">" | ">=":
            return _ordered(node, left, right)
    return _arithmetic(node, _integer(node, left), _integer(node, right))


def _kind(value: object) -> str:
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int | float):
        return "number"
    if isinstance(value, str):
        return "string"
    if isinstance(value, Mapping):
        return "mapping"
    return "list" if isinstance(value, Sequence) else type(value).__name__


def _same(left: object, right: object) -> bool:
    """Equality that never mixes kinds: true is not 1."""
    kinds = _kind(left), _kind(right)
    if kinds == ("list", "list"):
        assert isinstance(left, Sequence)
        assert isinstance(right, Sequence)
        return len(left) == len(right) and all(map(_same, left, right))
    return kinds[0] == kinds[1] and bool(left == right)


def _equal(node: Binary, left: object, right: object) -> bool:
    kinds = {_kind(left), _kind(right)} - {"none"}
    if len(kinds) > 1:
        _refuse(
            node, f"a {_kind(left)} is compared with a {_kind(right)}", left, f"two {_kind(left)}s, or none"
        )
    return _same(left, right)


def _contains(node: Binary, left: object, right: object) -> bool:
    if isinstance(right, str):
        if not isinstance(left, str):
            _refuse(node, "only a string can be in a string", left, "a string")
        return left in right
    if not isinstance(right, Sequence | Mapping):
        _refuse(node, "`in` a value that has no items", right, "a list, string or mapping")
    return any(_same(left, item) for item in right)


def _ordered(node: Binary, left: object, right: object) -> bool:
    for side in (left, right):
        if _kind(side) != "number":
            _refuse(node, f"{node.operator} of a value that is not a number", side, "two numbers")
    assert isinstance(left, int | float)
    assert isinstance(right, int | float)
    return {"<": left < right, "<=": left <= right, ">": left > right, ">=": left >= right}[node.operator]


def _arithmetic(node: Binary, left: int, right: int) -> int:
    if node.operator in ("//", "%") and right == 0:
        _refuse(node, "division by zero", right, "a divisor other than 0")
    match node.operator:
        case "+":
            return _bounded(node, left + right)
        case "-":
            return _bounded(node, left - right)
        case "//":
            return _bounded(node, left // right)
    return left % right


def _integer(node: Node, value: object) -> int:
    if not _is_integer(value):
        _refuse(node, "arithmetic on a value that is not an integer", value, "integers")
    return _bounded(node, value)  # type: ignore[arg-type]


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _bounded(node: Node, value: int) -> int:
    if abs(value) > MAX_INTEGER:
        _refuse(node, "the result is too large", "a larger magnitude", f"at most {MAX_INTEGER}")
    return value


def _refuse(node: Node, what: str, found: object, allowed: object) -> NoReturn:
    shown = repr(found) if not isinstance(found, int) or abs(found) <= MAX_INTEGER else "a larger magnitude"
    raise ExpressionError(
        what, node.column, found=shown if len(shown) <= 80 else shown[:77] + "...", allowed=allowed
    )
