"""Objects of classes that are read."""

from __future__ import annotations

import ast
from dataclasses import replace

from mlx_audit.source.arguments import Arguments
from mlx_audit.source.functions import call_function
from mlx_audit.source.machine import Frame, Machine, Record
from mlx_audit.source.resolution import find_member, lineage
from mlx_audit.source.values import OPAQUE, Class, Function, Instance, Value, of


def construct(machine: Machine, cls: Class, arguments: Arguments, node: ast.expr, frame: Frame) -> Value:
    """Return an object of a class that is read."""
    if _is_configuration(machine, cls, arguments):
        return OPAQUE
    key = cls, arguments, node, machine.guards, machine.phase
    if key in machine.built:
        return of(machine.built[key])
    guards = tuple(replace(guard, needs=guard.needs or full_name(cls)) for guard in machine.guards)
    instance = machine.built[key] = Instance(len(machine.heap))
    machine.heap.append(Record(cls, machine.phase, guards))
    member = find_member(machine, cls, "__init__")
    function = member.only() if member else None
    before, machine.guards = machine.guards, guards
    try:
        if isinstance(function, Function):
            call_function(machine, replace(function, receiver=of(instance)), arguments, node, frame)
        else:
            _fill_fields(machine, cls, instance, arguments)
    finally:
        machine.guards = before
    return of(instance)


def _fill_fields(machine: Machine, cls: Class, instance: Instance, arguments: Arguments) -> None:
    """Set the fields of a dataclass or named tuple."""
    fields = [
        s.target.id for s in cls.node.body if isinstance(s, ast.AnnAssign) and isinstance(s.target, ast.Name)
    ]
    attributes = machine.record(instance).attributes
    attributes.update(zip(fields, arguments.positional, strict=False))
    attributes.update((name, value) for name, value in arguments.keywords if name in fields)


def _is_configuration(machine: Machine, cls: Class, arguments: Arguments) -> bool:
    """Return whether the class holds settings: nothing is known of their values, not even by their defaults."""
    plain = any("dataclass" in ast.unparse(d) for d in cls.node.decorator_list) or any(
        isinstance(a, Class) and a.node.name == "BaseModelArgs" for a in lineage(machine, cls)
    )
    return plain and not arguments.tags()


def full_name(cls: Class) -> str:
    """Return a class's full name."""
    return f"{cls.module.name}.{cls.node.name}"
