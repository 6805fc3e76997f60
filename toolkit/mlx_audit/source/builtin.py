"""Python's builtin functions over values."""

from __future__ import annotations

import ast

from mlx_audit.source.arguments import Arguments
from mlx_audit.source.attributes import OF_CACHE
from mlx_audit.source.containers import elements
from mlx_audit.source.events import Called
from mlx_audit.source.judging import is_none
from mlx_audit.source.machine import Machine
from mlx_audit.source.resolution import find_member
from mlx_audit.source.tags import STATE, Tag
from mlx_audit.source.values import (
    NOTHING,
    OPAQUE,
    SIZE,
    Cache,
    Constant,
    External,
    Instance,
    Sequence,
    Value,
    constant,
    join,
    mapping,
    of,
    sequence,
    tagged,
)

_TYPES = {"builtins.int": "int", "builtins.float": "float", "builtins.str": "str", "builtins.bool": "bool"}


def run(machine: Machine, event: Called, arguments: Arguments) -> Value:
    """Return what a builtin returns."""
    name = event.target.removeprefix("builtins.")
    given = event.positional
    special = _SPECIAL.get(name)
    if special is not None:
        return special(machine, event, given)
    if name in ("getattr", "exec", "eval", "__import__", "globals", "locals", "vars"):
        machine.note(f"{name}() with what is known only when it runs", event.node, event.frame)
        return tagged(Tag.UNKNOWN | event.tags & STATE)
    if name == "dict":
        return mapping(dict(arguments.keywords), arguments.others or (OPAQUE if given else None))
    if name in ("print", "delattr"):
        return NOTHING
    return tagged(event.tags & ~Tag.MASK)


def _isinstance(machine: Machine, event: Called, given: tuple[Value, ...]) -> Value:
    if len(given) != 2:
        return OPAQUE
    value, types = given
    names = {thing.name for thing in _flattened(types) if isinstance(thing, External)}
    verdicts = {_is_one_of(thing, names) for thing in value.things}
    if value.open:
        verdicts.add(_array_is_one_of(value, names))
    if len(verdicts) == 1 and None not in verdicts:
        return constant(verdicts.pop())
    return tagged(Tag.UNKNOWN) if value.tags or any(isinstance(t, Cache) for t in value.things) else OPAQUE


def _is_one_of(thing: object, names: set[str]) -> bool | None:
    if not isinstance(thing, Constant) or not names:
        return None
    return any(_TYPES.get(name) == thing.type for name in names)


def _array_is_one_of(value: Value, names: set[str]) -> bool | None:
    if not value.has(Tag.POSITION | Tag.DATA | Tag.KEYS | Tag.MASK) or not names:
        return None
    return "mlx.core.array" in names or (False if names <= set(_TYPES) | _CONTAINERS else None)


_CONTAINERS = {"builtins.list", "builtins.tuple", "builtins.dict", "builtins.complex"}


def _flattened(value: Value) -> list[object]:
    found: list[object] = []
    for thing in value.things:
        found += [t for item in thing.items for t in item.things] if isinstance(thing, Sequence) else [thing]
    return found


def _hasattr(machine: Machine, event: Called, given: tuple[Value, ...]) -> Value:

    if len(given) != 2:
        return OPAQUE
    name = given[1].constant()
    thing = given[0].only()
    if isinstance(thing, Cache) and isinstance(name, str):
        optional = name in (
            "bits",
            "group_size",
            "lengths",
            "left_padding",
            "max_size",
            "_idx",
            "start_position",
        )
        known = name in OF_CACHE or name in ("make_mask", "update_and_fetch", "keys_and_values")
        return SIZE if optional else constant(known)
    if isinstance(thing, Instance) and isinstance(name, str):
        record = machine.record(thing)
        found = name in record.attributes or find_member(machine, record.cls, name) is not None
        return constant(True) if found else OPAQUE
    if is_none(given[0]):
        return constant(False)
    return SIZE if given[0].tags else OPAQUE


def _getattr(machine: Machine, event: Called, given: tuple[Value, ...]) -> Value:

    name = given[1].constant() if len(given) > 1 else None
    if not isinstance(name, str):
        machine.note("getattr() with a computed name", event.node, event.frame)
        return tagged(Tag.UNKNOWN | event.tags & STATE)
    found = machine.attribute(given[0], name, event.node, event.frame)
    return join(found, given[2]) if len(given) > 2 else found


def _setattr(machine: Machine, event: Called, given: tuple[Value, ...]) -> Value:

    if len(given) == 3 and isinstance(event.node, ast.Call) and event.node.args:
        name = given[1].constant()
        target = ast.Attribute(event.node.args[0], name if isinstance(name, str) else "?")
        machine.assign(ast.copy_location(target, event.node), given[2], event.frame)
    return NOTHING


def _len(machine: Machine, event: Called, given: tuple[Value, ...]) -> Value:
    thing = given[0].only() if given else None
    if isinstance(thing, Sequence) and thing.exact:
        return constant(len(thing.items))
    own = given[0].all_tags() & (Tag.OWN | Tag.GROWN) if given else Tag.NONE
    return tagged(Tag.SHAPE | (Tag.HELD if own else Tag.NONE)) if given and given[0].all_tags() else OPAQUE


def _range(machine: Machine, event: Called, given: tuple[Value, ...]) -> Value:
    return sequence([tagged(event.tags)], exact=False)


def _enumerate(machine: Machine, event: Called, given: tuple[Value, ...]) -> Value:
    return sequence([sequence([OPAQUE, elements(given[0])])], exact=False) if given else OPAQUE


def _zip(machine: Machine, event: Called, given: tuple[Value, ...]) -> Value:
    return sequence([sequence([elements(value) for value in given])], exact=False)


def _map(machine: Machine, event: Called, given: tuple[Value, ...]) -> Value:

    passed = Arguments(tuple(elements(value) for value in given[1:]))
    return (
        sequence([machine.call(given[0], passed, event.node, event.frame)], exact=False) if given else OPAQUE
    )


def _same_elements(machine: Machine, event: Called, given: tuple[Value, ...]) -> Value:
    if given and any(isinstance(thing, Sequence) for thing in given[0].things):
        return given[0]
    return sequence([elements(given[0])], exact=False) if given else sequence([])


def _type(machine: Machine, event: Called, given: tuple[Value, ...]) -> Value:
    return SIZE if event.tags else OPAQUE


def _minmax(machine: Machine, event: Called, given: tuple[Value, ...]) -> Value:
    numbers = [value.constant() for value in given]
    if len(given) > 1 and all(type(number) is int for number in numbers):
        return constant(
            (max if event.target.endswith("max") else min)(n for n in numbers if isinstance(n, int))
        )
    return tagged(event.tags)


def _super(machine: Machine, event: Called, given: tuple[Value, ...]) -> Value:
    return of(External("builtins.super()"))


_SPECIAL = {
    "isinstance": _isinstance,
    "hasattr": _hasattr,
    "getattr": _getattr,
    "setattr": _setattr,
    "object.__setattr__": _setattr,
    "len": _len,
    "range": _range,
    "enumerate": _enumerate,
    "zip": _zip,
    "map": _map,
    "list": _same_elements,
    "tuple": _same_elements,
    "iter": _same_elements,
    "reversed": _same_elements,
    "sorted": _same_elements,
    "type": _type,
    "max": _minmax,
    "min": _minmax,
    "super": _super,
}
