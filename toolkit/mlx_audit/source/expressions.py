"""How expressions run."""

from __future__ import annotations

import ast

from mlx_audit.source import containers
from mlx_audit.source.arguments import Arguments
from mlx_audit.source.attributes import bind
from mlx_audit.source.branching import branch
from mlx_audit.source.containers import elements
from mlx_audit.source.events import Formatted, Tested
from mlx_audit.source.indexing import item_of, sliced
from mlx_audit.source.judging import truth
from mlx_audit.source.machine import Frame, Machine, expression
from mlx_audit.source.resolution import find_member, lineage, lookup
from mlx_audit.source.values import (
    NOTHING,
    OPAQUE,
    Cache,
    External,
    Function,
    Instance,
    Mapping,
    Module,
    Sequence,
    Value,
    constant,
    join,
    mapping,
    of,
    sequence,
    tagged,
)


@expression(ast.Constant)
def _constant(machine: Machine, node: ast.Constant, frame: Frame) -> Value:
    if isinstance(node.value, bool | int | float | str | None):
        return constant(node.value)
    return OPAQUE


@expression(ast.Name)
def _name(machine: Machine, node: ast.Name, frame: Frame) -> Value:
    found = frame.find(node.id)
    return lookup(machine, frame.module, node.id) if found is None else found


@expression(ast.Attribute)
def _attribute(machine: Machine, node: ast.Attribute, frame: Frame) -> Value:
    if (
        isinstance(node.value, ast.Call)
        and isinstance(node.value.func, ast.Name)
        and node.value.func.id == "super"
    ):
        return _of_super(machine, node, frame)
    return machine.attribute(machine.value(node.value, frame), node.attr, node, frame)


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


@expression(ast.Call)
def _call(machine: Machine, node: ast.Call, frame: Frame) -> Value:
    target = machine.value(node.func, frame)
    arguments = _arguments(machine, node, frame)
    if isinstance(node.func, ast.Attribute) and node.func.attr in containers.ADDING:
        _put_in(machine, node.func, arguments, frame)
    return machine.call(target, arguments, node, frame)


def _put_in(machine: Machine, method: ast.Attribute, arguments: Arguments, frame: Frame) -> None:
    """Run `holder.append(x)` and the like: the holder now holds x."""
    holder = machine.value(method.value, frame)
    if any(isinstance(thing, Sequence | Mapping) for thing in holder.things) or isinstance(
        method.value, ast.Name
    ):
        if any(isinstance(thing, Instance | Cache | External | Module) for thing in holder.things):
            return
        machine.assign(method.value, containers.added(holder, method.attr, arguments), frame, changed=True)


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
            rest = join(*([rest] if rest else []), elements(spread))
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


@expression(ast.IfExp)
def _conditional(machine: Machine, node: ast.IfExp, frame: Frame) -> Value:
    results = []
    for body, guard in branch(machine, node.test, node.body, node.orelse, frame):
        with machine.guarded(*guard):
            assert isinstance(body, ast.expr)
            results.append(machine.value(body, frame))
    return join(*results)


@expression(ast.Tuple, ast.List, ast.Set)
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
            items.append(elements(spread))
    return sequence(items, exact)


@expression(ast.Dict)
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


@expression(ast.Subscript)
def _subscript(machine: Machine, node: ast.Subscript, frame: Frame) -> Value:

    base = machine.value(node.value, frame)
    event = sliced(machine, node, base, frame)
    machine.tell(event)
    return item_of(machine, node, base, event, frame)


@expression(ast.Lambda)
def _lambda(machine: Machine, node: ast.Lambda, frame: Frame) -> Value:
    return of(Function(frame.module, node, closure=machine.closure(frame)))


@expression(ast.ListComp, ast.SetComp, ast.GeneratorExp)
def _comprehension(
    machine: Machine, node: ast.ListComp | ast.SetComp | ast.GeneratorExp, frame: Frame
) -> Value:
    inner = _looped(machine, node.generators, frame)
    return sequence([machine.value(node.elt, inner)], exact=False) if inner else sequence([])


@expression(ast.DictComp)
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
        machine.assign(generator.target, elements(machine.value(generator.iter, inner)), inner)
        for condition in generator.ifs:
            tested = machine.value(condition, inner)
            machine.tell(Tested(condition, inner, tested))
            if truth(tested) is False:
                return None
    return inner


@expression(ast.JoinedStr)
def _text(machine: Machine, node: ast.JoinedStr, frame: Frame) -> Value:
    for part in node.values:
        if isinstance(part, ast.FormattedValue):
            machine.tell(Formatted(part, frame, machine.value(part.value, frame)))
    return OPAQUE


@expression(ast.NamedExpr)
def _named(machine: Machine, node: ast.NamedExpr, frame: Frame) -> Value:
    value = machine.value(node.value, frame)
    machine.assign(node.target, value, frame)
    return value


@expression(ast.Yield, ast.YieldFrom, ast.Await)
def _yield(machine: Machine, node: ast.Yield | ast.YieldFrom | ast.Await, frame: Frame) -> Value:
    value = machine.value(node.value, frame) if node.value else NOTHING
    frame.yielded.append(elements(value) if isinstance(node, ast.YieldFrom) else value)
    return OPAQUE
