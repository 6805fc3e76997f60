"""Calls of functions that are read."""

from __future__ import annotations

import ast

from mlx_audit.source.arguments import Arguments
from mlx_audit.source.conditions import Conditions
from mlx_audit.source.events import Memoized, Rotated
from mlx_audit.source.judging import lasting
from mlx_audit.source.machine import DEEPEST_CALL, Frame, Machine
from mlx_audit.source.resolution import decorators
from mlx_audit.source.tags import STATE, Tag
from mlx_audit.source.values import (
    NOTHING,
    OPAQUE,
    Function,
    Instance,
    Mapping,
    Sequence,
    Value,
    join,
    mapping,
    sequence,
    tagged,
)

_MEMOIZING = ("functools.lru_cache", "functools.cache", "functools.cached_property")


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
            return _handed_back(machine, function, machine.memo[key], node, frame)
        if key in machine.running or len(machine.running) >= DEEPEST_CALL:
            if key not in machine.running:
                machine.stopped = f"{frame.module.file}:{node.lineno}: calls nest too deeply to be followed"
            return tagged(arguments.tags() & STATE | Tag.UNKNOWN)
        machine.running.append(key)
        try:
            machine.memo[key] = _run(machine, function, arguments, frame)
        finally:
            machine.running.pop()
        return _handed_back(machine, function, machine.memo[key], node, frame)


def _handed_back(
    machine: Machine,
    function: Function,
    outcome: tuple[Value, dict[str, Value]],
    node: ast.expr,
    frame: Frame,
) -> Value:
    """Return a result, after lists and dictionaries that were filled on the way are as the function left them."""
    result, filled = outcome
    if filled and isinstance(node, ast.Call):
        bound = 1 if function.receiver and function.owner else 0
        names = [parameter.arg for parameter in function.node.args.args[bound:]]
        given = dict(zip(names, node.args, strict=False)) | {
            word.arg: word.value for word in node.keywords if word.arg
        }
        for name, value in filled.items():
            passed = given.get(name)
            if isinstance(passed, ast.Name) and frame.find(passed.id) is not None:
                machine.assign(passed, value, frame, changed=True)
    return result


def _filled(inner: Frame, before: dict[str, Value]) -> dict[str, Value]:
    """Return the parameters that hold a list or dictionary which the function changed."""
    filled = {}
    for name, value in before.items():
        if any(isinstance(thing, Sequence | Mapping) for thing in value.things) and not value.has(
            Tag.LASTING
        ):
            after = join(*(end[name] for end in inner.ends if name in end))
            if after != value and after.things:
                filled[name] = after
    return filled


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


def _run(
    machine: Machine, function: Function, arguments: Arguments, caller: Frame
) -> tuple[Value, dict[str, Value]]:
    """Return what a function returns, and what it made of the lists and dictionaries that it was given."""
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
        return machine.value(node.body, inner), {}
    before = dict(inner.names)
    falls_through = machine.block(node.body, inner)
    if inner.yielded:
        return sequence([join(*inner.yielded)], exact=False), {}
    if falls_through:
        inner.ends.append(inner.names)
    if falls_through or not inner.returned:
        inner.returned.append(NOTHING if falls_through else OPAQUE)
    return join(*inner.returned), _filled(inner, before)


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
