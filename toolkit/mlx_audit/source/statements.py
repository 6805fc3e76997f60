"""How statements run. Each returns whether control can pass it."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from typing import Any

from mlx_audit.source import builtin, containers
from mlx_audit.source.conditions import Conditions, guard, text_of
from mlx_audit.source.events import Kept, Stored, Tested
from mlx_audit.source.machine import STATEMENTS, Frame, Machine, Record
from mlx_audit.source.values import (
    NOTHING,
    OPAQUE,
    Cache,
    Class,
    Constant,
    Dims,
    External,
    Function,
    Instance,
    Mapping,
    Sequence,
    Tag,
    Value,
    join,
    of,
    tagged,
    truth,
)  # fmt: skip

Run = Callable[[Machine, Any, Frame], bool]

_ROUNDS = 6


def _runs(*types: type[ast.stmt]) -> Callable[[Run], Run]:
    def register(run: Run) -> Run:
        STATEMENTS.update(dict.fromkeys(types, run))
        return run

    return register


@_runs(ast.Expr)
def _expression(machine: Machine, node: ast.Expr, frame: Frame) -> bool:
    machine.value(node.value, frame)
    return True


@_runs(ast.Assign)
def _assign(machine: Machine, node: ast.Assign, frame: Frame) -> bool:
    value = machine.value(node.value, frame)
    for target in node.targets:
        assign(machine, target, value, frame)
    return True


@_runs(ast.AnnAssign)
def _annotated(machine: Machine, node: ast.AnnAssign, frame: Frame) -> bool:
    if node.value is not None:
        assign(machine, node.target, machine.value(node.value, frame), frame)
    return True


@_runs(ast.AugAssign)
def _augmented(machine: Machine, node: ast.AugAssign, frame: Frame) -> bool:
    from mlx_audit.source.expressions import combine

    before = machine.value(node.target, frame)
    assign(
        machine,
        node.target,
        combine(machine, node, type(node.op), before, machine.value(node.value, frame), frame),
        frame,
    )
    return True


def assign(machine: Machine, target: ast.expr, value: Value, frame: Frame, changed: bool = False) -> None:
    """Bind a target; `changed` says that what it holds was changed in place."""
    if isinstance(target, ast.Name):
        _bind(machine, target, value, frame, changed)
    elif isinstance(target, ast.Tuple | ast.List):
        _unpack(machine, target.elts, value, frame)
    elif isinstance(target, ast.Starred):
        assign(machine, target.value, value, frame)
    elif isinstance(target, ast.Attribute):
        holder = machine.value(target.value, frame)
        for thing in holder.things:
            if isinstance(thing, Instance):
                set_attribute(machine, thing, target, value, frame)
            elif isinstance(thing, Cache):
                machine.tell(Kept(target, frame, target.attr, value, own=False))
            elif isinstance(thing, Class | External | Function):
                machine.tell(Stored(target, frame, text_of(target), value, memo=False))
    elif isinstance(target, ast.Subscript):
        _set_item(machine, target, value, frame)


def _bind(machine: Machine, target: ast.Name, value: Value, frame: Frame, changed: bool) -> None:
    home = frame
    while changed and target.id not in home.names and home.outer is not None:
        home = home.outer
    outside = target.id in frame.globals or (changed and target.id not in home.names)
    if outside or (changed and home.names[target.id].has(Tag.LASTING)):
        machine.tell(Stored(target, frame, target.id, value, memo=_memoizes(machine, target.id)))
    if outside:
        return
    home.names[target.id] = value


def _unpack(machine: Machine, targets: list[ast.expr], value: Value, frame: Frame) -> None:
    thing = value.only()
    if isinstance(thing, Sequence) and thing.exact:
        star = next((i for i, target in enumerate(targets) if isinstance(target, ast.Starred)), None)
        if star is None and len(thing.items) == len(targets):
            for target, item in zip(targets, thing.items, strict=True):
                assign(machine, target, item, frame)
            return
        if star is not None and len(thing.items) >= len(targets) - 1:
            after = len(targets) - star - 1
            middle = thing.items[star : len(thing.items) - after]
            items = [*thing.items[:star], builtin.sequence(middle), *thing.items[len(thing.items) - after :]]
            for target, item in zip(targets, items, strict=True):
                assign(machine, target, item, frame)
            return
    for index, target in enumerate(targets):
        assign(machine, target, _element(value, index, len(targets)), frame)


def _element(value: Value, index: int, count: int) -> Value:
    from mlx_audit.source.indexing import size

    thing = value.only()
    if isinstance(thing, Dims):
        return size(thing, length=count > 2 and index == count - 2)
    parts = []
    for held in value.things:
        if isinstance(held, Sequence) and held.exact and len(held.items) == count:
            parts.append(held.items[index])
        elif isinstance(held, Sequence):
            parts.append(join(*held.items) if held.items else OPAQUE)
    if parts and not value.open:
        return join(*parts)
    return join(*parts, builtin.elements(value))


def set_attribute(
    machine: Machine, thing: Instance, target: ast.Attribute, value: Value, frame: Frame
) -> None:
    """Set an attribute of an object, and tell the rules if it outlives the step."""
    record = machine.record(thing)
    name = target.attr
    if machine.phase != "step":
        strong = frame.branches == 0
        before = record.attributes.get(name)
        record.attributes[name] = value if strong or before is None else join(before, value)
        record.places.setdefault(name, (target, frame))
        return
    if record.born == "model":
        machine.changed = machine.changed or name not in record.held
        record.held.add(name)
        machine.tell(Stored(target, frame, text_of(target), value, memo=_memoizes(machine, text_of(target))))
    elif record.born == "cache":
        _keep(machine, record, target, value, frame)
    before = record.attributes.get(name)
    after = join(before, value) if before is not None else value
    if after != before:
        record.attributes[name] = after
        machine.changed = True


def _keep(machine: Machine, record: Record, target: ast.Attribute, value: Value, frame: Frame) -> None:
    """Run an assignment to an attribute of a cache of the model's own."""
    before = record.attributes.get(target.attr, NOTHING)
    number = any(isinstance(t, Constant) and t.type in ("int", "float") for t in before.things)
    if (number or target.attr in record.held) and not value.has(Tag.DATA | Tag.KEYS | Tag.POSITION):
        machine.changed = machine.changed or target.attr not in record.held
        record.held.add(target.attr)
        machine.tell(Kept(target, frame, text_of(target), tagged(Tag.HELD), own=True))
        if target.attr in record.places:
            place, home = record.places[target.attr]
            machine.tell(Kept(place, home, text_of(place), tagged(Tag.HELD), own=True))
        return
    if any(isinstance(thing, Sequence | Mapping) for thing in value.things) and value != before:
        machine.tell(Kept(target, frame, text_of(target), value, own=True))
    tags = Tag.OWN if value.has(Tag.DATA | Tag.KEYS) else Tag.POSITION if value.open else Tag.NONE
    marked = join(before, Value(value.tags | tags, value.things, value.open))
    if marked != before:
        record.attributes[target.attr] = marked
        machine.changed = True


def _set_item(machine: Machine, target: ast.Subscript, value: Value, frame: Frame) -> None:
    from mlx_audit.source.indexing import sliced

    holder = machine.value(target.value, frame)
    event = sliced(machine, target, holder, frame)
    machine.tell(event)
    for thing in holder.things:
        if isinstance(thing, Cache):
            machine.tell(Kept(target, frame, "", value, own=False))
        elif isinstance(thing, Instance):
            _set_item_of(machine, thing, target, (*event.indices, value), frame)
    if any(isinstance(thing, Cache | Instance) for thing in holder.things):
        return
    key = event.indices[0] if len(event.indices) == 1 and not event.lower and not event.upper else OPAQUE
    if isinstance(target.value, ast.Name | ast.Attribute):
        assign(machine, target.value, containers.with_item(holder, key, value), frame, changed=True)


def _set_item_of(
    machine: Machine, thing: Instance, target: ast.Subscript, passed: tuple[Value, ...], frame: Frame
) -> None:
    """Run `object[key] = value`: its own `__setitem__`, or that of a module, which sets an attribute."""
    from mlx_audit.source.attributes import of_instance
    from mlx_audit.source.calls import Arguments, call

    method = of_instance(machine, thing, "__setitem__", target, frame)
    if method.things:
        call(machine, method, Arguments(passed), target, frame)
        return
    key = passed[0].constant()
    attribute = ast.Attribute(target.value, key if isinstance(key, str) else "?")
    set_attribute(machine, thing, ast.copy_location(attribute, target), passed[-1], frame)


def _memoizes(machine: Machine, name: str) -> bool:
    """Return whether a place is filled under a test of itself, as a memo is."""
    return any(name in text_of(tested) for tested in machine.tested)


def branch(
    machine: Machine, test: ast.expr, body: Any, orelse: Any, frame: Frame
) -> Iterator[tuple[Any, Conditions]]:
    """Yield the branches that a test may take, each with the conditions under which it does."""
    value = machine.value(test, frame)
    machine.tell(Tested(test, frame, value))
    verdict = truth(value)
    configured = verdict is None and not value.all_tags() & ~Tag.LASTING
    place = _class_of(machine, frame)
    needs = place if machine.phase == "step" else ""
    if verdict is not False:
        yield body, ((guard(test, True, place, needs),) if configured else ())
    if verdict is not True:
        chained = isinstance(orelse, list) and len(orelse) == 1 and isinstance(orelse[0], ast.If)
        opposite = configured and not chained
        yield orelse, ((guard(test, False, place, needs),) if opposite else ())


def _class_of(machine: Machine, frame: Frame) -> str:
    """Return the full name of the class whose object runs."""
    from mlx_audit.source.calls import full_name

    thing = frame.receiver.only() if frame.receiver else None
    return full_name(machine.record(thing).cls) if isinstance(thing, Instance) else ""


@_runs(ast.If)
def _if(machine: Machine, node: ast.If, frame: Frame) -> bool:
    before = frame.names
    after: list[dict[str, Value]] = []
    passed: list[Conditions] = []
    left: list[Conditions] = []
    machine.tested.append(node.test)
    frame.branches += 1
    try:
        for body, guards in branch(machine, node.test, node.body, node.orelse, frame):
            frame.names = dict(before)
            with machine.guarded(*guards):
                if machine.block(body, frame):
                    after.append(frame.names)
                    passed.append(guards)
                elif not _raises(body):
                    left.append(guards)
    finally:
        frame.branches -= 1
        machine.tested.pop()
    frame.names = merged(after) if after else before
    if left and len(passed) == 1:
        machine.guards += tuple(guard for guard in passed[0] if guard not in machine.guards)
    return bool(after)


def _raises(body: list[ast.stmt]) -> bool:
    return bool(body) and isinstance(body[-1], ast.Raise)


def merged(frames: list[dict[str, Value]]) -> dict[str, Value]:
    """Return the names as they are after one of several ways through."""
    if len(frames) == 1:
        return frames[0]
    names = dict.fromkeys(name for frame in frames for name in frame)
    return {name: join(*(frame[name] for frame in frames if name in frame)) for name in names}


@_runs(ast.For, ast.AsyncFor)
def _for(machine: Machine, node: ast.For, frame: Frame) -> bool:
    iterated = machine.value(node.iter, frame)
    if iterated == builtin.sequence([]):
        return machine.block(node.orelse, frame)
    item = builtin.elements(iterated)

    def enter() -> None:
        assign(machine, node.target, item, frame)

    _loop(machine, node.body, enter, frame)
    return machine.block(node.orelse, frame)


@_runs(ast.While)
def _while(machine: Machine, node: ast.While, frame: Frame) -> bool:
    def enter() -> None:
        machine.tell(Tested(node.test, frame, machine.value(node.test, frame)))

    value = machine.value(node.test, frame)
    if truth(value) is not False:
        _loop(machine, node.body, enter, frame)
    enter()
    return machine.block(node.orelse, frame)


def _loop(machine: Machine, body: list[ast.stmt], enter: Callable[[], None], frame: Frame) -> None:
    """Run a body until another round tells nothing new, a few times at most."""
    leaving, frame.leaving = frame.leaving, []
    frame.branches += 1
    for _ in range(_ROUNDS):
        before = dict(frame.names)
        enter()
        ends = [frame.names] if machine.block(body, frame) else []
        frame.names = merged([before, *ends, *frame.leaving])
        if frame.names == before:
            break
    frame.branches -= 1
    frame.leaving = leaving


@_runs(ast.Return)
def _return(machine: Machine, node: ast.Return, frame: Frame) -> bool:
    frame.returned.append(machine.value(node.value, frame) if node.value else NOTHING)
    return False


@_runs(ast.Raise)
def _raise(machine: Machine, node: ast.Raise, frame: Frame) -> bool:
    return False


@_runs(ast.Break, ast.Continue)
def _leave(machine: Machine, node: ast.Break | ast.Continue, frame: Frame) -> bool:
    frame.leaving.append(dict(frame.names))
    return False


@_runs(ast.Assert)
def _assert(machine: Machine, node: ast.Assert, frame: Frame) -> bool:
    machine.tell(Tested(node.test, frame, machine.value(node.test, frame)))
    return True


@_runs(ast.With, ast.AsyncWith)
def _with(machine: Machine, node: ast.With, frame: Frame) -> bool:
    for item in node.items:
        value = machine.value(item.context_expr, frame)
        if item.optional_vars is not None:
            assign(machine, item.optional_vars, value, frame)
    return machine.block(node.body, frame)


@_runs(ast.Try)
def _try(machine: Machine, node: ast.Try, frame: Frame) -> bool:
    before = dict(frame.names)
    passes = machine.block(node.body, frame) and machine.block(node.orelse, frame)
    after = [frame.names] if passes else []
    for handler in node.handlers:
        frame.names = merged([before, dict(frame.names)])
        if machine.block(handler.body, frame):
            after.append(frame.names)
    frame.names = merged(after) if after else before
    return machine.block(node.finalbody, frame) and bool(after)


@_runs(ast.Match)
def _match(machine: Machine, node: ast.Match, frame: Frame) -> bool:
    subject = machine.value(node.subject, frame)
    machine.tell(Tested(node.subject, frame, subject.without(Tag.DATA)))
    before = frame.names
    after = [before]
    for case in node.cases:
        frame.names = dict(before)
        for part in ast.walk(case.pattern):
            name = getattr(part, "name", None) or getattr(part, "rest", None)
            if isinstance(name, str):
                frame.names[name] = subject
        if machine.block(case.body, frame):
            after.append(frame.names)
    frame.names = merged(after)
    return True


@_runs(ast.FunctionDef, ast.AsyncFunctionDef)
def _function(machine: Machine, node: ast.FunctionDef, frame: Frame) -> bool:
    from mlx_audit.source.expressions import closure

    frame.names[node.name] = of(Function(frame.module, node, closure=closure(machine, frame)))
    return True


@_runs(ast.ClassDef)
def _class(machine: Machine, node: ast.ClassDef, frame: Frame) -> bool:
    frame.names[node.name] = of(Class(frame.module, node))
    return True


@_runs(ast.Import, ast.ImportFrom)
def _import(machine: Machine, node: ast.Import | ast.ImportFrom, frame: Frame) -> bool:
    from mlx_audit.source.resolution import _bound

    for alias in node.names:
        name = alias.asname or alias.name.split(".")[0]
        frame.names[name] = _bound(machine, frame.module, name, node)
    return True


@_runs(ast.Global)
def _global(machine: Machine, node: ast.Global, frame: Frame) -> bool:
    frame.globals.update(node.names)
    return True
