"""How operators run: arithmetic, comparisons, `and`, `or`, `not`."""

from __future__ import annotations

import ast
from collections.abc import Callable
from typing import Any

from mlx_audit.source import arrays
from mlx_audit.source.events import Combined, Formatted, Tested
from mlx_audit.source.judging import is_none, truth
from mlx_audit.source.machine import Frame, Machine, expression
from mlx_audit.source.tags import Tag, union
from mlx_audit.source.values import (
    NOTHING,
    OPAQUE,
    SIZE,
    Constant,
    Dims,
    External,
    Mapping,
    Sequence,
    Value,
    constant,
    join,
    sequence,
    tagged,
)

_LARGEST = 2**63


@expression(ast.BinOp)
def _binary(machine: Machine, node: ast.BinOp, frame: Frame) -> Value:
    return combine(
        machine, node, type(node.op), machine.value(node.left, frame), machine.value(node.right, frame), frame
    )


_OPERATORS: dict[type[ast.operator], str] = {
    ast.Add: "add", ast.Sub: "subtract", ast.Mult: "multiply", ast.Div: "divide", ast.FloorDiv: "floor_divide",
    ast.Mod: "remainder", ast.Pow: "power", ast.MatMult: "matmul", ast.BitAnd: "bitwise_and", ast.BitOr: "bitwise_or",
}  # fmt: skip


def combine(
    machine: Machine, node: ast.AST, operator: type[ast.operator], left: Value, right: Value, frame: Frame
) -> Value:
    """Return what an operator makes of two values."""
    name = _OPERATORS.get(operator, "other")
    machine.tell(Combined(node, frame, name, left, right))
    if isinstance(left.constant(), str) and name == "remainder":
        machine.tell(Formatted(node, frame, right))
        return OPAQUE
    known = _folded(name, left, right)
    if known is not None:
        return known
    tags = left.all_tags() | right.all_tags()
    if not tags:
        return OPAQUE
    if not tags & (Tag.DATA | Tag.KEYS | Tag.MASK | Tag.RANGE | Tag.OWN):
        shortened = name == "subtract" and left.has(Tag.LENGTH) and not right.has(Tag.LENGTH)
        return tagged(tags | Tag.BEFORE if shortened else tags, left.shape or right.shape)
    return arrays.result(name, (left, right), {})


def _folded(name: str, left: Value, right: Value) -> Value | None:
    """Return what is known of the result of host arithmetic."""
    one, two = left.only(), right.only()
    if name == "add" and isinstance(one, Sequence) and isinstance(two, Sequence):
        return sequence([*one.items, *two.items], exact=one.exact and two.exact)
    if name == "add" and isinstance(one, Sequence) and isinstance(two, Dims):
        return tagged(Tag.SHAPE)
    if name == "multiply" and (isinstance(one, Sequence) or isinstance(two, Sequence)):
        held, times = (one, right) if isinstance(one, Sequence) else (two, left)
        assert isinstance(held, Sequence)
        return (
            sequence([join(*held.items)] if held.items else [], exact=False)
            if not times.has(Tag.POSITION)
            else None
        )
    a, b = left.constant(), right.constant()
    if type(a) is not int or type(b) is not int or max(abs(a), abs(b)) >= _LARGEST:
        return None
    if name in ("floor_divide", "remainder"):
        return (constant(a // b) if name == "floor_divide" else constant(a % b)) if b else OPAQUE
    results = {"add": a + b, "subtract": a - b, "multiply": a * b}
    return constant(results[name]) if name in results else None


@expression(ast.UnaryOp)
def _unary(machine: Machine, node: ast.UnaryOp, frame: Frame) -> Value:
    value = machine.value(node.operand, frame)
    if isinstance(node.op, ast.Not):
        machine.tell(Tested(node, frame, value))
        verdict = truth(value)
        return tagged(value.tags & ~Tag.POSITION | Tag.SHAPE) if verdict is None and value.tags else (
            OPAQUE if verdict is None else constant(not verdict)
        )  # fmt: skip
    number = value.constant()
    if isinstance(node.op, ast.USub) and type(number) is int:
        return constant(-number)
    return Value(value.tags, shape=value.shape)


@expression(ast.BoolOp)
def _boolean(machine: Machine, node: ast.BoolOp, frame: Frame) -> Value:
    """Run `and` and `or`: the first operand that decides is the result."""
    deciding = isinstance(node.op, ast.Or)
    results: list[Value] = []
    for index, operand in enumerate(node.values):
        value = machine.value(operand, frame)
        if index == len(node.values) - 1:
            results.append(value)
            break
        machine.tell(Tested(operand, frame, value))
        verdict = truth(value)
        if verdict is deciding:
            results.append(value)
            break
        if verdict is None:
            results.append(_fitting(value, deciding))
    return join(*results)


def _fitting(value: Value, deciding: bool) -> Value:
    """Return an undecided operand as far as it would be the result."""
    if not deciding:
        return value
    kept = frozenset(thing for thing in value.things if not (isinstance(thing, Constant) and not thing.value))
    return Value(value.tags, kept, value.open, value.shape) if kept or value.open else OPAQUE


@expression(ast.Compare)
def _compare(machine: Machine, node: ast.Compare, frame: Frame) -> Value:
    left = machine.value(node.left, frame)
    results = []
    for index, (operator, right_node) in enumerate(zip(node.ops, node.comparators, strict=True)):
        right = machine.value(right_node, frame)
        result = _compared(machine, node, operator, left, right, frame)
        if index < len(node.ops) - 1:
            machine.tell(Tested(node, frame, result))
        results.append(result)
        left = right
    if len(results) > 1:
        verdicts = [truth(result) for result in results]
        if False in verdicts:
            return constant(False)
    return results[0] if len(results) == 1 else join(*results)


def _compared(
    machine: Machine, node: ast.Compare, operator: ast.cmpop, left: Value, right: Value, frame: Frame
) -> Value:
    same = isinstance(operator, ast.Is | ast.Eq)
    if isinstance(operator, ast.Is | ast.IsNot) or NOTHING in (left, right):
        verdict = _identical(left, right)
        known = left.tags | right.tags
        return constant(verdict is same) if verdict is not None else (SIZE if known else OPAQUE)
    if isinstance(operator, ast.In | ast.NotIn):
        return _contained(machine, node, left, right, frame, isinstance(operator, ast.In))
    verdict = _decided(operator, left, right)
    if verdict is not None:
        return constant(verdict)
    tags = union(value.all_tags() for value in (left, right) if not isinstance(value.only(), Constant))
    if tags & (Tag.DATA | Tag.KEYS | Tag.MASK | Tag.RANGE | Tag.POSITION | Tag.OWN):
        if tags & Tag.POSITION and not tags & (Tag.RANGE | Tag.DATA | Tag.MASK):
            return tagged(tags)
        return (
            arrays.result("equal", (left, right), {})
            if not tags & Tag.DATA
            else tagged(Tag.DATA | tags & Tag.OWN)
        )
    return tagged(tags)


def _identical(left: Value, right: Value) -> bool | None:
    if right == NOTHING:
        return is_none(left)
    if left == NOTHING:
        return is_none(right)
    one, two = left.only(), right.only()
    if isinstance(one, Constant) and isinstance(two, Constant):
        return one == two
    return None


def _decided(operator: ast.cmpop, left: Value, right: Value) -> bool | None:
    """Return the outcome of a comparison of constants, of a type with a mask's, of an array with text."""
    one, two = left.only(), right.only()
    equality = isinstance(operator, ast.Eq | ast.NotEq)
    if equality and left.has(Tag.SHAPE) and left.has(Tag.MASK):
        boolean = isinstance(two, External) and two.name in ("mlx.core.bool_", "mlx.core.bool")
        return boolean is isinstance(operator, ast.Eq) if isinstance(two, External) else None
    if equality and isinstance(two, Constant) and two.type == "str" and left.open and not left.things and left.has(
        Tag.MASK | Tag.DATA | Tag.KEYS
    ):  # fmt: skip
        return isinstance(operator, ast.NotEq)
    if not (isinstance(one, Constant) and isinstance(two, Constant)):
        return None
    try:
        return bool(_COMPARISONS[type(operator)](one.value, two.value))
    except (KeyError, TypeError):
        return None


_COMPARISONS: dict[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Eq: lambda a, b: a == b, ast.NotEq: lambda a, b: a != b, ast.Lt: lambda a, b: a < b,
    ast.LtE: lambda a, b: a <= b, ast.Gt: lambda a, b: a > b, ast.GtE: lambda a, b: a >= b,
}  # fmt: skip


def _contained(
    machine: Machine, node: ast.Compare, left: Value, right: Value, frame: Frame, wanted: bool
) -> Value:
    if left.has(Tag.POSITION | Tag.DATA | Tag.HELD):
        machine.tell(Tested(node, frame, left))
    thing, item = right.only(), left.only()
    if isinstance(thing, Sequence) and thing.exact and isinstance(item, Constant):
        constants = [held.only() for held in thing.items]
        if all(isinstance(held, Constant) for held in constants):
            return constant((item in constants) is wanted)
    changing = any(isinstance(thing, Mapping) for thing in right.things) or right.has(Tag.LASTING)
    return tagged(Tag.UNKNOWN) if left.tags or changing else OPAQUE
