"""Calls: of functions and classes that are read, and of what is not."""

from __future__ import annotations

import ast
from dataclasses import replace

from mlx_audit.source.arguments import Arguments
from mlx_audit.source.construction import construct
from mlx_audit.source.externals import call_external, call_method, call_opaque, mask_of
from mlx_audit.source.functions import call_function
from mlx_audit.source.machine import Frame, Machine
from mlx_audit.source.resolution import find_member, lineage
from mlx_audit.source.tags import Tag
from mlx_audit.source.values import (
    Class,
    External,
    Function,
    Instance,
    Method,
    Module,
    Partial,
    Value,
    join,
    of,
)


def call(machine: Machine, target: Value, arguments: Arguments, node: ast.expr, frame: Frame) -> Value:
    """Return what calling a value returns."""

    results = []
    for thing in sorted(target.things, key=_order):
        if isinstance(thing, Function):
            mask = mask_of(machine, thing, arguments, node, frame)
            results.append(mask or call_function(machine, thing, arguments, node, frame))
        elif isinstance(thing, Class):
            results.append(construct(machine, thing, arguments, node, frame))
        elif isinstance(thing, Instance):
            results.append(call_instance(machine, thing, arguments, node, frame))
        elif isinstance(thing, External):
            results.append(call_external(machine, thing.name, arguments, node, frame))
        elif isinstance(thing, Method):
            results.append(call_method(machine, thing.receiver, thing.name, arguments, node, frame))
        elif isinstance(thing, Partial):
            passed = Arguments(
                (*thing.positional, *arguments.positional),
                tuple({**dict(thing.keywords), **dict(arguments.keywords)}.items()),
                arguments.rest,
                arguments.others,
            )
            results.append(machine.call(thing.target, passed, node, frame))
        elif isinstance(thing, Module):
            results.append(call_opaque(machine, thing, arguments, node, frame))
    if target.open or not results:
        results.append(call_opaque(machine, None, arguments, node, frame, unknown=target.has(Tag.UNKNOWN)))
    return join(*results)


def _order(thing: object) -> str:
    return f"{type(thing).__name__}:{getattr(getattr(thing, 'node', None), 'lineno', 0)}"


def call_instance(
    machine: Machine, thing: Instance, arguments: Arguments, node: ast.expr, frame: Frame
) -> Value:
    """Call an object: its `__call__`, under the conditions under which it was built."""

    record = machine.record(thing)
    member = find_member(machine, record.cls, "__call__")
    function = member.only() if member else None
    if not isinstance(function, Function):
        return call_opaque(machine, _nearest_module(machine, record.cls), arguments, node, frame)
    return call_function(machine, replace(function, receiver=of(thing)), arguments, node, frame)


def _nearest_module(machine: Machine, cls: Class) -> Module:
    names = [ancestor.name for ancestor in lineage(machine, cls) if isinstance(ancestor, External)]
    return Module(names[0] if names else cls.node.name)
