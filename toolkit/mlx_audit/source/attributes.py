"""Attributes: of objects, classes, modules, caches and arrays."""

from __future__ import annotations

import ast

from mlx_audit.source.arguments import Arguments
from mlx_audit.source.judging import lasting
from mlx_audit.source.machine import Frame, Machine, Record
from mlx_audit.source.resolution import decorators, find_member, is_cache, lookup, module_named
from mlx_audit.source.tags import Tag
from mlx_audit.source.values import (
    CACHE,
    OPAQUE,
    SIZE,
    Cache,
    Class,
    Constant,
    Dims,
    External,
    Function,
    Instance,
    Method,
    Module,
    Namespace,
    Thing,
    Value,
    constant,
    join,
    of,
    sequence,
    tagged,
)

CACHED = tagged(Tag.KEYS | Tag.DATA, (SIZE, SIZE, tagged(Tag.SHAPE | Tag.LENGTH), SIZE))
"""What a cache hands out: keys or values over its whole buffer."""

POSITION = tagged(Tag.POSITION, (SIZE,))
"""The position of a fixed-capacity cache: an array of one number a row."""

OF_CACHE = {
    "offset": POSITION,
    "_offset": POSITION,
    "_idx": POSITION,
    "start_position": POSITION,
    "slot": POSITION,
    "keys": CACHED,
    "values": CACHED,
    "state": sequence([CACHED], exact=False),
    "cache": sequence([CACHED], exact=False),
    "caches": sequence([CACHE], exact=False),
    "left_padding": tagged(Tag.DATA),
    "lengths": join(tagged(Tag.DATA), constant(None)),
    "meta_state": POSITION,
    "nbytes": SIZE,
    "bits": OPAQUE,
    "group_size": OPAQUE,
    "max_size": OPAQUE,
    "keep": OPAQUE,
    "step": OPAQUE,
    "chunk_size": OPAQUE,
}

_HOST = frozenset({"dtype", "ndim", "size", "nbytes", "itemsize"})


def attribute(machine: Machine, value: Value, name: str, node: ast.expr, frame: Frame) -> Value:
    """Return an attribute of a value."""
    found = [_of_thing(machine, value, thing, name, node, frame) for thing in value.things]
    if value.open:
        found.append(_of_array(value, name))
    return join(*(one for one in found if one is not None)) if found else OPAQUE


def _of_thing(
    machine: Machine, value: Value, thing: Thing, name: str, node: ast.expr, frame: Frame
) -> Value | None:
    if isinstance(thing, External):
        return module_named(machine, f"{thing.name}.{name}")
    if isinstance(thing, Namespace):
        return lookup(machine, thing.module, name)
    if isinstance(thing, Instance):
        return of_instance(machine, thing, name, node, frame)
    if isinstance(thing, Class):
        return _of_class(machine, thing, name)
    if isinstance(thing, Cache):
        return _of_cache(name)
    if isinstance(thing, Module):
        return OPAQUE
    if isinstance(thing, Constant) and thing.value is None:
        return None if len(value.things) > 1 or value.open else OPAQUE
    if isinstance(thing, Method):
        return of(Method(thing.receiver, "scatter" if thing.name == "at" else name))
    return of(Method(of(thing, tags=value.tags), name))


def of_instance(machine: Machine, thing: Instance, name: str, node: ast.expr, frame: Frame) -> Value:
    """Return an attribute of an object, its own or its class's."""
    record = machine.record(thing)
    if name in record.held:
        return tagged(Tag.HELD)
    if name in record.attributes:
        return _kept(machine, record, name)
    member = find_member(machine, record.cls, name)
    if member is not None:
        return lasting(bind(machine, member, of(thing), record.cls, node, frame))
    if is_cache(machine, record.cls):
        return _of_cache(name)
    return constant(False) if name == "training" else OPAQUE


def _kept(machine: Machine, record: Record, name: str) -> Value:
    """Return what an object holds; what a step put there is marked, and its numbers are not known."""
    value = record.attributes[name]
    if machine.phase != "step" or record.born != "model":
        return value
    if name not in record.held:
        return lasting(value)
    numbers = {t for t in value.things if isinstance(t, Constant) and t.type in ("int", "float", "bool")}
    if not numbers:
        return lasting(Value(value.tags | Tag.KEPT, value.things, value.open, value.shape))
    return Value(value.tags | Tag.KEPT | Tag.SHAPE, value.things - numbers)


def bind(machine: Machine, member: Value, receiver: Value, cls: Class, node: ast.expr, frame: Frame) -> Value:
    """Return a class's member as it is seen on an object: a bound method, or what a property returns."""
    function = member.only()
    if not isinstance(function, Function) or function.owner is None:
        return member
    names = decorators(machine, function)
    bound = Function(function.module, function.node, function.owner, receiver)
    if "builtins.staticmethod" in names:
        return member
    if "builtins.classmethod" in names:
        return of(Function(function.module, function.node, function.owner, of(cls)))
    if any(name.endswith("property") for name in names):
        return machine.call(of(bound), Arguments(), node, frame)
    return of(bound)


def _of_class(machine: Machine, cls: Class, name: str) -> Value:
    if name == "__name__":
        return constant(cls.node.name)
    member = find_member(machine, cls, name)
    if member is None:
        return OPAQUE
    function = member.only()
    if isinstance(function, Function) and "builtins.classmethod" in decorators(machine, function):
        return of(Function(function.module, function.node, function.owner, of(cls)))
    return member


def _of_cache(name: str) -> Value:
    return OF_CACHE.get(name) or of(Method(CACHE, name))


def _of_array(value: Value, name: str) -> Value:
    """Return an attribute of an array, or of something that was not followed."""
    if not value.tags:
        return OPAQUE
    if name == "shape":
        return shape(value)
    if name in _HOST:
        return tagged(Tag.SHAPE | (Tag.HELD if value.has(Tag.GROWN) and name in ("size", "nbytes") else Tag.NONE)
                      | (Tag.MASK if value.has(Tag.MASK) and name == "dtype" else Tag.NONE))  # fmt: skip
    if name == "T":
        return tagged(value.tags, value.shape and tuple(reversed(value.shape)))
    return of(Method(value, name))


def shape(value: Value) -> Value:
    """Return the shape of an array."""
    if value.shape is not None:
        return sequence(value.shape)
    return of(Dims(value.tags & (Tag.KEYS | Tag.OWN | Tag.GROWN)), tags=Tag.SHAPE)
