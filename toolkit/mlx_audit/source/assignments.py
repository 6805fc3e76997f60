"""Assignments: to names, attributes and items, and what of that outlives the step."""

from __future__ import annotations

import ast

from mlx_audit.source import containers
from mlx_audit.source.arguments import Arguments
from mlx_audit.source.attributes import of_instance
from mlx_audit.source.conditions import text_of
from mlx_audit.source.containers import elements
from mlx_audit.source.events import Kept, Stored
from mlx_audit.source.indexing import size, sliced
from mlx_audit.source.machine import Frame, Machine, Record
from mlx_audit.source.tags import Tag
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
    Value,
    join,
    sequence,
    tagged,
)


def assign(machine: Machine, target: ast.expr, value: Value, frame: Frame, changed: bool = False) -> None:
    """Bind a target; `changed` says that what it holds was changed in place."""
    if isinstance(target, ast.Name):
        _bind(machine, target, value, frame, changed)
    elif isinstance(target, ast.Tuple | ast.List):
        _unpack(machine, target.elts, value, frame)
    elif isinstance(target, ast.Starred):
        machine.assign(target.value, value, frame)
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
                machine.assign(target, item, frame)
            return
        if star is not None and len(thing.items) >= len(targets) - 1:
            after = len(targets) - star - 1
            middle = thing.items[star : len(thing.items) - after]
            items = [*thing.items[:star], sequence(middle), *thing.items[len(thing.items) - after :]]
            for target, item in zip(targets, items, strict=True):
                machine.assign(target, item, frame)
            return
    for index, target in enumerate(targets):
        machine.assign(target, _element(value, index, len(targets)), frame)


def _element(value: Value, index: int, count: int) -> Value:

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
    return join(*parts, elements(value))


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
        machine.assign(target.value, containers.with_item(holder, key, value), frame, changed=True)


def _set_item_of(
    machine: Machine, thing: Instance, target: ast.Subscript, passed: tuple[Value, ...], frame: Frame
) -> None:
    """Run `object[key] = value`: its own `__setitem__`, or that of a module, which sets an attribute."""

    method = of_instance(machine, thing, "__setitem__", target, frame)
    if method.things:
        machine.call(method, Arguments(passed), target, frame)
        return
    key = passed[0].constant()
    attribute = ast.Attribute(target.value, key if isinstance(key, str) else "?")
    set_attribute(machine, thing, ast.copy_location(attribute, target), passed[-1], frame)


def _memoizes(machine: Machine, name: str) -> bool:
    """Return whether a place is filled under a test of itself, as a memo is."""
    return any(name in text_of(tested) for tested in machine.tested)
