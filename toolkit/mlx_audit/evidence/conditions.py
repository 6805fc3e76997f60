"""Does a model meet the condition of a hazard? Its modules are asked; what is not known counts as met."""

from __future__ import annotations

import ast
import operator
from collections.abc import Sequence
from typing import Any

_COMPARE: dict[type[ast.cmpop], Any] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
    ast.In: lambda left, right: left in right,
    ast.NotIn: lambda left, right: left not in right,
}
_SIMPLE = (bool, int, float, str, type(None))


class _Unknown(Exception):
    """The value is not to be had from the module alone."""


def is_met(model: Any, needs: Sequence[str], when: str) -> bool:
    """Return whether a model reaches a conditional hazard.

    It does where it has an instance of a class that the hazard needs, unless each instance's own attributes refute the
    condition. A hazard that needs no class is left to the trace: False.

    Args:
        model: An mlx.nn.Module.
        needs: Names of classes, of which one will do.
        when: A Python expression over `self`, an instance of one of them; empty for none. It is read, not evaluated.
    """
    names = {need.rpartition(".")[2] for need in needs}
    found = [m for m in model.modules() if names & {base.__name__ for base in type(m).__mro__}]
    if not when:
        return bool(found)
    try:
        condition = ast.parse(when, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return bool(found)
    return any(_truth(condition, module) is not False for module in found)


def _truth(node: ast.expr, module: Any) -> bool | None:
    """Return the truth of an expression for one module; None where it is not known."""
    if isinstance(node, ast.BoolOp):
        values = [_truth(value, module) for value in node.values]
        decisive = isinstance(node.op, ast.Or)
        if decisive in values:
            return decisive
        return None if None in values else not decisive
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        inner = _truth(node.operand, module)
        return None if inner is None else not inner
    try:
        return bool(_value(node, module))
    except _Unknown:
        return None


def _value(node: ast.expr, module: Any) -> Any:
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.List | ast.Tuple):
        return [_value(item, module) for item in node.elts]
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self":
        try:
            value = getattr(module, node.attr)
        except Exception:  # a property of model code may raise anything
            raise _Unknown from None
        if isinstance(value, _SIMPLE):
            return value
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in _COMPARE:
        left, right = _value(node.left, module), _value(node.comparators[0], module)
        try:
            return _COMPARE[type(node.ops[0])](left, right)
        except TypeError:
            raise _Unknown from None
    raise _Unknown
