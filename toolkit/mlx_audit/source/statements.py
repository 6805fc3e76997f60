"""How statements run. Each returns whether control can pass it."""

from __future__ import annotations

import ast
from collections.abc import Callable

from mlx_audit.source.assignments import assign
from mlx_audit.source.branching import branch
from mlx_audit.source.conditions import Conditions
from mlx_audit.source.containers import elements
from mlx_audit.source.events import Tested
from mlx_audit.source.judging import truth
from mlx_audit.source.machine import Frame, Machine, statement
from mlx_audit.source.operators import combine
from mlx_audit.source.resolution import bound
from mlx_audit.source.tags import Tag
from mlx_audit.source.values import NOTHING, Class, Function, Value, join, of, sequence

_ROUNDS = 6


@statement(ast.Expr)
def _expression(machine: Machine, node: ast.Expr, frame: Frame) -> bool:
    machine.value(node.value, frame)
    return True


@statement(ast.Assign)
def _assign(machine: Machine, node: ast.Assign, frame: Frame) -> bool:
    value = machine.value(node.value, frame)
    for target in node.targets:
        machine.assign(target, value, frame)
    return True


@statement(ast.AnnAssign)
def _annotated(machine: Machine, node: ast.AnnAssign, frame: Frame) -> bool:
    if node.value is not None:
        machine.assign(node.target, machine.value(node.value, frame), frame)
    return True


@statement(ast.AugAssign)
def _augmented(machine: Machine, node: ast.AugAssign, frame: Frame) -> bool:

    before = machine.value(node.target, frame)
    assign(
        machine,
        node.target,
        combine(machine, node, type(node.op), before, machine.value(node.value, frame), frame),
        frame,
    )
    return True


@statement(ast.If)
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


@statement(ast.For, ast.AsyncFor)
def _for(machine: Machine, node: ast.For, frame: Frame) -> bool:
    iterated = machine.value(node.iter, frame)
    if iterated == sequence([]):
        return machine.block(node.orelse, frame)
    item = elements(iterated)

    def enter() -> None:
        machine.assign(node.target, item, frame)

    _loop(machine, node.body, enter, frame)
    return machine.block(node.orelse, frame)


@statement(ast.While)
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


@statement(ast.Return)
def _return(machine: Machine, node: ast.Return, frame: Frame) -> bool:
    frame.returned.append(machine.value(node.value, frame) if node.value else NOTHING)
    frame.ends.append(frame.names)
    return False


@statement(ast.Raise)
def _raise(machine: Machine, node: ast.Raise, frame: Frame) -> bool:
    return False


@statement(ast.Break, ast.Continue)
def _leave(machine: Machine, node: ast.Break | ast.Continue, frame: Frame) -> bool:
    frame.leaving.append(dict(frame.names))
    return False


@statement(ast.Assert)
def _assert(machine: Machine, node: ast.Assert, frame: Frame) -> bool:
    machine.tell(Tested(node.test, frame, machine.value(node.test, frame)))
    return True


@statement(ast.With, ast.AsyncWith)
def _with(machine: Machine, node: ast.With, frame: Frame) -> bool:
    for item in node.items:
        value = machine.value(item.context_expr, frame)
        if item.optional_vars is not None:
            machine.assign(item.optional_vars, value, frame)
    return machine.block(node.body, frame)


@statement(ast.Try)
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


@statement(ast.Match)
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


@statement(ast.FunctionDef, ast.AsyncFunctionDef)
def _function(machine: Machine, node: ast.FunctionDef, frame: Frame) -> bool:

    frame.names[node.name] = of(Function(frame.module, node, closure=machine.closure(frame)))
    return True


@statement(ast.ClassDef)
def _class(machine: Machine, node: ast.ClassDef, frame: Frame) -> bool:
    frame.names[node.name] = of(Class(frame.module, node))
    return True


@statement(ast.Import, ast.ImportFrom)
def _import(machine: Machine, node: ast.Import | ast.ImportFrom, frame: Frame) -> bool:

    for alias in node.names:
        name = alias.asname or alias.name.split(".")[0]
        frame.names[name] = bound(machine, frame.module, name, node)
    return True


@statement(ast.Global)
def _global(machine: Machine, node: ast.Global, frame: Frame) -> bool:
    frame.globals.update(node.names)
    return True
