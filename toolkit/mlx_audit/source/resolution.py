"""What names mean: globals, imports, classes and what they inherit. Each is evaluated when it is first asked for."""

from __future__ import annotations

import ast
import builtins
from collections.abc import Iterator

from mlx_audit.source.judging import lasting
from mlx_audit.source.machine import Frame, Machine
from mlx_audit.source.modules import CACHES, MODELS, SourceModule, bindings
from mlx_audit.source.tags import Tag
from mlx_audit.source.values import OPAQUE, Class, External, Function, Namespace, Value, join, of, tagged

_LONGEST_LINEAGE = 64


def lookup(machine: Machine, module: SourceModule, name: str) -> Value:
    """Return what a name is bound to at the top level of a module, or among the builtins."""
    if name not in module.bindings:
        return of(External(f"builtins.{name}")) if hasattr(builtins, name) else tagged(Tag.UNKNOWN)
    key = module, name
    if key not in machine.constants:
        machine.constants[key] = tagged(Tag.UNKNOWN)  # what a cycle of imports sees
        values = [bound(machine, module, name, statement) for statement in module.bindings[name]]
        machine.constants[key] = lasting(join(*values))
    return machine.constants[key]


def bound(machine: Machine, module: SourceModule, name: str, statement: ast.stmt) -> Value:
    """Return what one statement at the top of a module or class binds a name to."""
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
        return of(Function(module, statement))
    if isinstance(statement, ast.ClassDef):
        return of(Class(module, statement))
    if isinstance(statement, ast.Import):
        return _imported(machine, statement, name)
    if isinstance(statement, ast.ImportFrom):
        return _imported_from(machine, module, statement, name)
    if isinstance(statement, ast.Assign | ast.AnnAssign) and statement.value is not None:
        targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
        if any(isinstance(target, ast.Name) and target.id == name for target in targets):
            return machine.value(statement.value, Frame(module, name))
    return OPAQUE


def _imported(machine: Machine, statement: ast.Import, name: str) -> Value:
    for alias in statement.names:
        if alias.asname == name:
            return module_named(machine, alias.name)
        if alias.asname is None and alias.name.split(".")[0] == name:
            return module_named(machine, name)
    return OPAQUE


def _imported_from(machine: Machine, module: SourceModule, statement: ast.ImportFrom, name: str) -> Value:
    original = next((a.name for a in statement.names if (a.asname or a.name) == name), name)
    home = imported_module(module, statement)
    source = machine.library.find(home)
    if source is not None and original in source.bindings:
        return lookup(machine, source, original)
    return module_named(machine, f"{home}.{original}")


def imported_module(module: SourceModule, statement: ast.ImportFrom) -> str:
    """Return the full name of the module that a statement imports from."""
    if not statement.level:
        return statement.module or ""
    package = module.name.split(".")[: -statement.level]
    return ".".join([*package, *([statement.module] if statement.module else [])])


def module_named(machine: Machine, name: str) -> Value:
    """Return a module that is read, or the name of something that is not."""
    source = machine.library.find(name)
    if source is not None:
        return of(Namespace(source))
    missing = name.startswith(f"{MODELS}.") and not name.startswith(CACHES)
    return of(External(name), tags=Tag.UNKNOWN if missing else Tag.NONE)


def lineage(machine: Machine, cls: Class) -> list[Class | External]:
    """Return a class and what it inherits from, in the order in which attributes are looked up."""
    found: list[Class | External] = []
    waiting: list[Class | External] = [cls]
    while waiting and len(found) < _LONGEST_LINEAGE:
        first = waiting.pop(0)
        if first in found:
            continue
        found.append(first)
        if isinstance(first, Class):
            waiting = [*_bases(machine, first), *waiting]
    return found


def _bases(machine: Machine, cls: Class) -> Iterator[Class | External]:
    frame = Frame(cls.module, cls.node.name)
    for base in cls.node.bases:
        yield from (t for t in machine.value(base, frame).things if isinstance(t, Class | External))


def find_member(machine: Machine, cls: Class, name: str, after: Class | None = None) -> Value | None:
    """Return what a class binds a name to, or what it inherits; `after` skips the classes up to that one."""
    ancestors = lineage(machine, cls)
    if after in ancestors:
        ancestors = ancestors[ancestors.index(after) + 1 :]
    for ancestor in ancestors:
        if isinstance(ancestor, Class):
            for statement in bindings(ancestor.node).get(name, [])[:1]:
                if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
                    return of(Function(ancestor.module, statement, ancestor))
                return bound(machine, ancestor.module, name, statement)
    return None


def is_cache(machine: Machine, cls: Class) -> bool:
    """Return whether a class inherits from one of mlx-lm's caches."""
    return any(isinstance(a, External) and a.name.startswith(CACHES) for a in lineage(machine, cls))


def decorators(machine: Machine, function: Function) -> list[str]:
    """Return the names of a function's decorators: `property`, `functools.lru_cache`, …"""
    if isinstance(function.node, ast.Lambda):
        return []
    frame = Frame(function.module, "")
    names = []
    for decorator in function.node.decorator_list:
        target = decorator.func if isinstance(decorator, ast.Call) else decorator
        thing = machine.value(target, frame).only()
        names.append(thing.name if isinstance(thing, External) else ast.unparse(target))
    return names
