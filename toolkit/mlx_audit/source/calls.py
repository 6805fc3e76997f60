"""Calls: of functions and classes that are read, and of what is not."""

from __future__ import annotations

import ast
from dataclasses import dataclass, replace

from mlx_audit.source.conditions import Conditions
from mlx_audit.source.events import Memoized, Rotated
from mlx_audit.source.machine import DEEPEST_CALL, Frame, Machine, Record
from mlx_audit.source.resolution import decorators, find_member, lineage
from mlx_audit.source.values import (
    NOTHING,
    OPAQUE,
    STATE,
    Class,
    External,
    Function,
    Instance,
    Method,
    Module,
    Partial,
    Tag,
    Tags,
    Value,
    join,
    lasting,
    mapping,
    of,
    sequence,
    tagged,
    union,
)  # fmt: skip

_MEMOIZING = ("functools.lru_cache", "functools.cache", "functools.cached_property")


@dataclass(frozen=True, slots=True)
class Arguments:
    """What a call passes. `rest` stands for positional arguments of which the number is unknown."""

    positional: tuple[Value, ...] = ()
    keywords: tuple[tuple[str, Value], ...] = ()
    rest: Value | None = None
    others: Value | None = None

    def tags(self) -> Tags:
        """Return all that goes in."""
        return union(value.all_tags() for value in self.values())

    def values(self) -> tuple[Value, ...]:
        """Return all arguments."""
        more = [value for value in (self.rest, self.others) if value is not None]
        return (*self.positional, *(value for _, value in self.keywords), *more)


def call(machine: Machine, target: Value, arguments: Arguments, node: ast.expr, frame: Frame) -> Value:
    """Return what calling a value returns."""
    from mlx_audit.source.externals import call_external, call_method, call_opaque, mask_of

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
            results.append(call(machine, thing.target, passed, node, frame))
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
    from mlx_audit.source.externals import call_opaque

    record = machine.record(thing)
    member = find_member(machine, record.cls, "__call__")
    function = member.only() if member else None
    if not isinstance(function, Function):
        return call_opaque(machine, _nearest_module(machine, record.cls), arguments, node, frame)
    return call_function(machine, replace(function, receiver=of(thing)), arguments, node, frame)


def _nearest_module(machine: Machine, cls: Class) -> Module:
    names = [ancestor.name for ancestor in lineage(machine, cls) if isinstance(ancestor, External)]
    return Module(names[0] if names else cls.node.name)


def call_function(
    machine: Machine, function: Function, arguments: Arguments, node: ast.expr, frame: Frame
) -> Value:
    """Return what a function returns; one call with the same arguments under the same conditions is run once."""
    guards: Conditions = ()
    owner = function.receiver.only() if function.receiver else None
    if isinstance(owner, Instance) and machine.phase == "step":
        guards = machine.record(owner).guards
    with machine.guarded(*guards):
        _tell_memoized(machine, function, arguments, node, frame)
        _tell_rotated(machine, function, arguments, node, frame)
        key = function, arguments, machine.guards, machine.phase
        if key in machine.memo:
            return machine.memo[key]
        if key in machine.running or len(machine.running) >= DEEPEST_CALL:
            if key not in machine.running:
                machine.stopped = f"{frame.module.file}:{node.lineno}: calls nest too deeply to be followed"
            return tagged(arguments.tags() & STATE | Tag.UNKNOWN)
        machine.running.append(key)
        try:
            result = _run(machine, function, arguments, frame)
        finally:
            machine.running.pop()
        machine.memo[key] = result
        return result


def _tell_memoized(
    machine: Machine, function: Function, arguments: Arguments, node: ast.expr, frame: Frame
) -> None:
    if machine.phase == "step" and any(name in _MEMOIZING for name in decorators(machine, function)):
        tags = arguments.tags()
        name = getattr(function.node, "name", "<lambda>")
        machine.tell(Memoized(node, frame, name, tagged(tags)))


def _tell_rotated(
    machine: Machine, function: Function, arguments: Arguments, node: ast.expr, frame: Frame
) -> None:
    """Tell where a rotation is asked for; inside it, the offset is only passed on."""
    if not takes_offset(function):
        return
    names = [parameter.arg for parameter in function.node.args.args]
    index = names.index("offset") - (1 if function.receiver and function.owner else 0)
    named = dict(arguments.keywords)
    offset = named.get("offset") or (
        arguments.positional[index] if index < len(arguments.positional) else None
    )
    if offset is not None:
        machine.tell(Rotated(node, frame, offset))


def takes_offset(function: Function) -> bool:
    """Return whether a function is a rotation that is told the position by a parameter `offset`."""
    name = function.owner.node.name if function.owner else getattr(function.node, "name", "")
    named = any(part in name.lower() for part in ("rope", "rotary"))
    return named and any(parameter.arg == "offset" for parameter in function.node.args.args)


def _run(machine: Machine, function: Function, arguments: Arguments, caller: Frame) -> Value:
    node = function.node
    name = "<lambda>" if isinstance(node, ast.Lambda) else node.name
    symbol = f"{function.owner.node.name}.{name}" if function.owner else name
    inner = Frame(function.module, symbol, owner=function.owner, receiver=function.receiver)
    inner.rotation = takes_offset(function)
    if function.closure >= 0:
        inner.outer = machine.closures[function.closure]
        inner.owner, inner.receiver = inner.outer.owner, inner.outer.receiver
        inner.symbol = inner.outer.symbol if isinstance(node, ast.Lambda) else f"{inner.outer.symbol}.{name}"
    if inner.receiver is None:
        inner.receiver = caller.receiver
    _bind_parameters(machine, function, arguments, inner)
    if isinstance(node, ast.Lambda):
        return machine.value(node.body, inner)
    falls_through = machine.block(node.body, inner)
    if inner.yielded:
        return sequence([join(*inner.yielded)], exact=False)
    if falls_through or not inner.returned:
        inner.returned.append(NOTHING if falls_through else OPAQUE)
    return join(*inner.returned)


def _bind_parameters(machine: Machine, function: Function, arguments: Arguments, inner: Frame) -> None:
    """Give each parameter what the call passes, or its default."""
    spec = function.node.args
    names = [parameter.arg for parameter in (*spec.posonlyargs, *spec.args)]
    defaults = dict(zip(reversed(names), reversed(spec.defaults), strict=False))
    defaults |= {p.arg: d for p, d in zip(spec.kwonlyargs, spec.kw_defaults, strict=True) if d is not None}
    bound = function.receiver is not None and function.owner is not None
    positional = [*([function.receiver] if bound and function.receiver else []), *arguments.positional]
    passed = dict(zip(names, positional, strict=False))
    if arguments.rest is not None:
        passed |= {name: arguments.rest for name in names[len(positional) :] if name not in defaults}
    known = {*names, *(parameter.arg for parameter in spec.kwonlyargs)}
    passed |= {name: value for name, value in arguments.keywords if name in known}
    outer = Frame(function.module, inner.symbol, outer=inner.outer)
    for name in known:
        if name in passed:
            inner.names[name] = passed[name]
        elif arguments.others is not None and name not in defaults:
            inner.names[name] = arguments.others
        else:
            inner.names[name] = lasting(machine.value(defaults[name], outer)) if name in defaults else OPAQUE
    if spec.vararg:
        extra = positional[len(names) :]
        rest = arguments.rest
        inner.names[spec.vararg.arg] = sequence([*extra, rest], exact=False) if rest else sequence(extra)
    if spec.kwarg:
        more = {name: value for name, value in arguments.keywords if name not in known}
        inner.names[spec.kwarg.arg] = mapping(more, arguments.others)


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
