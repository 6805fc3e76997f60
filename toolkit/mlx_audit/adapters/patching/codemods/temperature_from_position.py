"""The scale of queries by their position, computed with arrays."""

from __future__ import annotations

import itertools
import re

import libcst as cst

from mlx_audit.adapters.patching import code
from mlx_audit.adapters.patching.base import Codemod
from mlx_audit.adapters.patching.statements import LINE, block, indentation, said, written

_RANGE = re.compile(
    r"mx\.arange\((?P<offset>\w+) \+ (?P<first>\d+), (?P=offset) \+ (?P<length>\w+) \+ (?P=first)\)"
)
_ELEMENTWISE = re.compile(r"mx\.(log|log1p|log2|exp|floor|ceil|sqrt|rsqrt|square|abs)")
_SCALAR = re.compile(r"self\.\w+|\d+(\.\d*)?")
_HEADS_FIRST = r".+\.reshape\(.*\)\.transpose\(0, 2, 1, 3\)"

_POSITIONS = "positions = mx.arange({first}, {length} + {first}) + mx.array({offset})[..., None]\n"


class TemperatureFromPosition(Codemod):
    """Scales queries `[B, heads, L, width]` by their positions without a range between bounds that the host must know.

        scales = mx.log(mx.arange(offset + 1, offset + L + 1))               before
        scales = scales[:, None]
        queries = queries * scales

        positions = mx.arange(1, L + 1) + mx.array(offset)[..., None]        after
        scales = mx.log(positions)
        scales = scales[..., None, :, None]
        queries = queries * scales

    The same integers for an offset that is an int, so the same scales bit for bit; a row of a batch gets its own for an
    offset that is an array of one each.
    """

    name = "temperature_from_position"
    mends = ("SRC001",)

    def apply(self, tree: cst.Module) -> cst.Module:
        changes: dict[cst.CSTNode, code.Change] = {}
        parents = code.parents(tree)
        for function in code.functions(tree):
            for body in map(block, code.walk(function)):
                for line, after in itertools.pairwise(body):
                    lines = _mended(function, parents, line, after)
                    if lines:
                        changes[line] = cst.FlattenSentinel(lines[:-1])
                        changes[after] = lines[-1]
        return code.replaced(tree, changes)


def _mended(
    function: cst.FunctionDef, parents: code.Parents, line: cst.BaseStatement, after: cst.BaseStatement
) -> list[cst.BaseStatement]:
    """Return what two statements become: the scales, and their axes beside those of the queries."""
    scales, value = _assigned(line)
    ranges = [(node, found) for node in code.walk(value) if (found := _found(node))] if value else []
    if value is None or len(ranges) != 1:
        return []
    node, bounds = ranges[0]
    if (
        said(after) != f"{scales} = {scales}[:, None]"
        or not _is_elementwise(node, value, parents)
        or not _is_position(function, bounds["offset"])
        or not _scales_heads(function, parents, scales)
        or "positions" in code.names(function)
    ):
        return []
    mended = code.text(value).replace(code.text(node), "positions")
    return written(
        _POSITIONS.format(**bounds.groupdict())
        + _laid_out(scales, mended, indentation(line, parents))
        + f"{scales} = {scales}[..., None, :, None]\n",
        line,
    )


def _found(node: cst.CSTNode) -> re.Match[str] | None:
    match node:
        case cst.Call(func=cst.Attribute(attr=cst.Name("arange"))):
            return _RANGE.fullmatch(code.text(node))
    return None


def _is_elementwise(node: cst.CSTNode, value: cst.CSTNode, parents: code.Parents) -> bool:
    """Return whether a value is made of the range, numbers and attributes alone, number by number."""
    while node is not value:
        node, inner = parents[node], node
        match node:
            case cst.Arg():
                continue
            case cst.Call(func=function, args=[_]) if _ELEMENTWISE.fullmatch(code.text(function)):
                continue
            case cst.BinaryOperation(left=left, right=right):
                other = right if inner is left else left
                if not _SCALAR.fullmatch(code.text(other)):
                    return False
            case _:
                return False
    return True


def _is_position(function: cst.FunctionDef, name: str) -> bool:
    """Return whether a name is the offset of a cache, or a constant where there is none."""
    values = [code.text(value) if value else "" for stored, value in code.stores(function) if stored == name]
    return any(value.endswith(".offset") for value in values) and all(
        re.fullmatch(r"[\w.\[\]]+\.offset|0", value) for value in values
    )


def _scales_heads(function: cst.FunctionDef, parents: code.Parents, scales: str) -> bool:
    """Return whether scales do nothing but multiply, once, an array of which the heads come first."""
    heads = {
        name
        for name, value in code.stores(function)
        if value and re.fullmatch(_HEADS_FIRST, code.text(value))
    }
    names = [node for node in code.walk(function) if isinstance(node, cst.Name) and node.value == scales]
    products = 0
    for name in names:
        match parents[name]:
            case cst.BinaryOperation(left=cst.Name(left), operator=cst.Multiply(), right=cst.Name(right)):
                products += {left, right} - {scales} <= heads
            case cst.AssignTarget() | cst.Subscript():
                continue
            case _:
                return False
    return products == 1 and len(names) == 4


def _assigned(line: cst.BaseStatement) -> tuple[str, cst.BaseExpression | None]:
    match line:
        case cst.SimpleStatementLine([cst.Assign([cst.AssignTarget(cst.Name(name))], value)]):
            return name, value
    return "", None


def _laid_out(name: str, value: str, column: int) -> str:
    """Return an assignment in one line, or with its sum broken before the last term."""
    if column + len(f"{name} = {value}") <= LINE:
        return f"{name} = {value}\n"
    terms, plus, last = value.rpartition(" + ")
    lines = [terms, f"+ {last}"] if plus else [last]
    return "\n    ".join([f"{name} = (", *lines]) + "\n)\n"
