"""How expressions run."""

from __future__ import annotations

import ast
from collections.abc import Callable
from typing import Any, TypeVar

from mlx_audit.source import arrays, builtin, containers
from mlx_audit.source.attributes import attribute, bind
from mlx_audit.source.calls import Arguments, call
from mlx_audit.source.events import Combined, Formatted, Tested
from mlx_audit.source.machine import EXPRESSIONS, Frame, Machine
from mlx_audit.source.resolution import find_member, lineage, lookup
from mlx_audit.source.statements import assign, branch
from mlx_audit.source.values import (
    NOTHING,
    OPAQUE,
    SIZE,
    Cache,
    Constant,
    Dims,
    External,
    Function,
    Instance,
    Mapping,
    Module,
    Sequence,
    Tag,
    Value,
    constant,
    is_none,
    join,
    mapping,
    of,
    sequence,
    tagged,
    truth,
)  # fmt: skip

Node = TypeVar("Node", bound=ast.expr)
Run = Callable[[Machine, Any, Frame], Value]

_LARGEST = 2**63


def _runs(*types: type[ast.expr]) -> Callable[[Run], Run]:
    def register(run: Run) -> Run:
        EXPRESSIONS.update(dict.fromkeys(types, run))
        return run

    return register


@_runs(ast.Constant)
def _constant(machine: Machine, node: ast.Constant, frame: Frame) -> Value:
    if isinstance(node.value, bool | int | float | str | None):
        return constant(node.value)
    return OPAQUE


@_runs(ast.Name)
def _name(machine: Machine, node: ast.Name, frame: Frame) -> Value:
    found = frame.find(node.id)
    return lookup(machine, frame.module, node.id) if found is None else found


@_runs(ast.Attribute)
def _attribute(machine: Machine, node: ast.Attribute, frame: Frame) -> Value:
    if (
        isinstance(node.value, ast.Call)
        and isinstance(node.value.func, ast.Name)
        and node.value.func.id == "super"
    ):
        return _of_super(machine, node, frame)
    return attribute(machine, machine.value(node.value, frame), node.attr, node, frame)


def _of_super(machine: Machine, node: ast.Attribute, frame: Frame) -> Value:
    thing = frame.receiver.only() if frame.receiver else None
    if not isinstance(thing, Instance) or frame.receiver is None:
        return OPAQUE
    cls = machine.record(thing).cls
    member = find_member(machine, cls, node.attr, after=frame.owner)
    if member is not None:
        return bind(machine, member, frame.receiver, cls, node, frame)
    outside = [a.name for a in lineage(machine, cls) if isinstance(a, External)]
    return of(Module(outside[0])) if outside and node.attr == "__call__" else OPAQUE


@_runs(ast.Call)
def _call(machine: Machine, node: ast.Call, frame: Frame) -> Value:
    target = machine.value(node.func, frame)
    arguments = _arguments(machine, node, frame)
    if isinstance(node.func, ast.Attribute) and node.func.attr in containers.ADDING:
        _put_in(machine, node.func, arguments, frame)
    return call(machine, target, arguments, node, frame)


def _put_in(machine: Machine, method: ast.Attribute, arguments: Arguments, frame: Frame) -> None:
    """Run `holder.append(x)` and the like: the holder now holds x."""
    holder = machine.value(method.value, frame)
    if any(isinstance(thing, Sequence | Mapping) for thing in holder.things) or isinstance(
        method.value, ast.Name
    ):
        if any(isinstance(thing, Instance | Cache | External | Module) for thing in holder.things):
            return
        assign(machine, method.value, containers.added(holder, method.attr, arguments), frame, changed=True)


def _arguments(machine: Machine, node: ast.Call, frame: Frame) -> Arguments:
    positional: list[Value] = []
    rest: Value | None = None
    for argument in node.args:
        if not isinstance(argument, ast.Starred):
            positional.append(machine.value(argument, frame))
            continue
        spread = machine.value(argument.value, frame)
        thing = spread.only()
        if isinstance(thing, Sequence) and thing.exact:
            positional += thing.items
        else:
            rest = join(*([rest] if rest else []), builtin.elements(spread))
    if rest is not None and len(positional) < len(node.args) - 1:
        rest = join(rest, *positional)
    keywords: dict[str, Value] = {}
    others: Value | None = None
    for keyword in node.keywords:
        value = machine.value(keyword.value, frame)
        if keyword.arg:
            keywords[keyword.arg] = value
            continue
        for thing in value.things:
            if isinstance(thing, Mapping):
                keywords |= dict(thing.items)
                others = thing.rest or others
        if value.open:
            others = join(*([others] if others else []), tagged(value.all_tags()))
    return Arguments(tuple(positional), tuple(keywords.items()), rest, others)


@_runs(ast.BinOp)
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
        minus = (
            Tag.BEFORE
            if name == "subtract" and left.has(Tag.LENGTH) and not right.has(Tag.LENGTH)
            else Tag.NONE
        )
        between = (
            Tag.BEFORE if name == "subtract" and left.has(Tag.LENGTH) and _blocks(left, right) else Tag.NONE
        )
        return tagged(tags | minus | between)
    return arrays.result(name, (left, right), {})


def _blocks(left: Value, right: Value) -> bool:
    return left.has(Tag.LENGTH) and not right.has(Tag.LENGTH)


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


@_runs(ast.UnaryOp)
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


@_runs(ast.BoolOp)
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


@_runs(ast.Compare)
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
    tags = left.all_tags() | right.all_tags()
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


@_runs(ast.IfExp)
def _conditional(machine: Machine, node: ast.IfExp, frame: Frame) -> Value:
    results = []
    for body, guard in branch(machine, node.test, node.body, node.orelse, frame):
        with machine.guarded(*guard):
            assert isinstance(body, ast.expr)
            results.append(machine.value(body, frame))
    return join(*results)


@_runs(ast.Tuple, ast.List, ast.Set)
def _literal(machine: Machine, node: ast.Tuple | ast.List | ast.Set, frame: Frame) -> Value:
    items: list[Value] = []
    exact = True
    for element in node.elts:
        if not isinstance(element, ast.Starred):
            items.append(machine.value(element, frame))
            continue
        spread = machine.value(element.value, frame)
        thing = spread.only()
        if isinstance(thing, Sequence) and thing.exact:
            items += thing.items
        else:
            exact = False
            items.append(builtin.elements(spread))
    return sequence(items, exact)


@_runs(ast.Dict)
def _dict(machine: Machine, node: ast.Dict, frame: Frame) -> Value:
    items: dict[str, Value] = {}
    rest: list[Value] = []
    for key, item in zip(node.keys, node.values, strict=True):
        value = machine.value(item, frame)
        name = machine.value(key, frame).constant() if key is not None else None
        if isinstance(name, str):
            items[name] = value
        elif key is not None:
            rest.append(value)
        else:
            thing = value.only()
            items |= dict(thing.items) if isinstance(thing, Mapping) else {}
            rest += [tagged(value.all_tags())] if not isinstance(thing, Mapping) else []
    return mapping(items, join(*rest) if rest else None)


@_runs(ast.Subscript)
def _subscript(machine: Machine, node: ast.Subscript, frame: Frame) -> Value:
    from mlx_audit.source.indexing import item_of, sliced

    base = machine.value(node.value, frame)
    event = sliced(machine, node, base, frame)
    machine.tell(event)
    return item_of(machine, node, base, event, frame)


@_runs(ast.Lambda)
def _lambda(machine: Machine, node: ast.Lambda, frame: Frame) -> Value:
    return of(Function(frame.module, node, closure=closure(machine, frame)))


def closure(machine: Machine, frame: Frame) -> int:
    """Return the number under which a frame is kept for the functions defined in it."""
    for number in range(len(machine.closures) - 1, max(-1, len(machine.closures) - 50), -1):
        if machine.closures[number] is frame:
            return number
    machine.closures.append(frame)
    return len(machine.closures) - 1


@_runs(ast.ListComp, ast.SetComp, ast.GeneratorExp)
def _comprehension(
    machine: Machine, node: ast.ListComp | ast.SetComp | ast.GeneratorExp, frame: Frame
) -> Value:
    inner = _looped(machine, node.generators, frame)
    return sequence([machine.value(node.elt, inner)], exact=False) if inner else sequence([])


@_runs(ast.DictComp)
def _dict_comprehension(machine: Machine, node: ast.DictComp, frame: Frame) -> Value:
    inner = _looped(machine, node.generators, frame)
    if inner is None:
        return mapping({})
    machine.value(node.key, inner)
    return mapping({}, machine.value(node.value, inner))


def _looped(machine: Machine, generators: list[ast.comprehension], frame: Frame) -> Frame | None:
    """Return a frame in which the targets are bound; None where nothing is looped over."""
    inner = Frame(frame.module, frame.symbol, outer=frame, owner=frame.owner, receiver=frame.receiver)
    for generator in generators:
        assign(machine, generator.target, builtin.elements(machine.value(generator.iter, inner)), inner)
        for condition in generator.ifs:
            tested = machine.value(condition, inner)
            machine.tell(Tested(condition, inner, tested))
            if truth(tested) is False:
                return None
    return inner


@_runs(ast.JoinedStr)
def _text(machine: Machine, node: ast.JoinedStr, frame: Frame) -> Value:
    for part in node.values:
        if isinstance(part, ast.FormattedValue):
            machine.tell(Formatted(part, frame, machine.value(part.value, frame)))
    return OPAQUE


@_runs(ast.NamedExpr)
def _named(machine: Machine, node: ast.NamedExpr, frame: Frame) -> Value:
    value = machine.value(node.value, frame)
    assign(machine, node.target, value, frame)
    return value


@_runs(ast.Yield, ast.YieldFrom, ast.Await)
def _yield(machine: Machine, node: ast.Yield | ast.YieldFrom | ast.Await, frame: Frame) -> Value:
    value = machine.value(node.value, frame) if node.value else NOTHING
    frame.yielded.append(builtin.elements(value) if isinstance(node, ast.YieldFrom) else value)
    return OPAQUE
