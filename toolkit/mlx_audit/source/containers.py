"""Methods of lists, dictionaries and text."""

from __future__ import annotations

from mlx_audit.source.arguments import Arguments
from mlx_audit.source.tags import Tag
from mlx_audit.source.values import (
    NOTHING,
    OPAQUE,
    Cache,
    Constant,
    Dims,
    Instance,
    Mapping,
    Module,
    Sequence,
    Value,
    constant,
    join,
    mapping,
    of,
    sequence,
    tagged,
)

ADDING = frozenset({"append", "extend", "insert", "add", "appendleft", "update", "setdefault"})
"""Methods that put something into a container."""


def method(thing: Sequence | Mapping | Constant | Dims, name: str, arguments: Arguments) -> Value:
    """Return what a method returns; what it puts in is the caller's affair."""
    if isinstance(thing, Mapping):
        return _of_mapping(thing, name, arguments)
    if isinstance(thing, Sequence):
        if name in ("pop", "popleft", "copy"):
            return of(thing) if name == "copy" else join(*thing.items) if thing.items else OPAQUE
        return NOTHING if name in ADDING or name in ("clear", "sort", "reverse", "remove") else OPAQUE
    return OPAQUE


def _of_mapping(thing: Mapping, name: str, arguments: Arguments) -> Value:
    held = [value for _, value in thing.items] + ([thing.rest] if thing.rest else [])
    everything = join(*held) if held else OPAQUE
    if name in ("get", "pop", "setdefault") and arguments.positional:
        key = arguments.positional[0].constant()
        default = arguments.positional[1:] or (NOTHING,)
        return dict(thing.items).get(str(key)) or join(everything, *default)
    if name == "values":
        return sequence([everything], exact=False)
    if name == "items":
        return sequence([sequence([OPAQUE, everything])], exact=False)
    if name == "keys":
        return sequence([constant(key) for key, _ in thing.items] or [OPAQUE], exact=not thing.rest)
    return of(thing) if name == "copy" else NOTHING


def added(holder: Value, name: str, arguments: Arguments) -> Value:
    """Return a container after a method put something into it."""
    given = join(*arguments.values()) if arguments.values() else OPAQUE
    results = []
    for thing in holder.things:
        if isinstance(thing, Sequence):
            results.append(_extended(thing, name, given))
        elif isinstance(thing, Mapping):
            results.append(mapping(dict(thing.items), join(thing.rest, given) if thing.rest else given))
    if holder.open:
        results.append(tagged(holder.tags | given.all_tags()))
    return join(*results) if results else holder


def _extended(thing: Sequence, name: str, given: Value) -> Value:
    if name in ("extend", "update"):
        given = elements(given)
    return sequence([*thing.items, given], exact=False)


def with_item(holder: Value, key: Value, item: Value) -> Value:
    """Return a container after `holder[key] = item`."""
    name = key.constant()
    results = []
    for thing in holder.things:
        if isinstance(thing, Mapping):
            items = dict(thing.items)
            if isinstance(name, str):
                results.append(mapping({**items, name: item}, thing.rest))
            else:
                results.append(mapping(items, join(thing.rest, item) if thing.rest else item))
        elif isinstance(thing, Sequence):
            results.append(sequence([*thing.items, item], exact=False))
    if holder.open:
        array = Tag.DATA | Tag.KEYS | Tag.OWN
        tags = holder.tags | item.tags & (array if holder.has(array) or item.has(array) else ~Tag.SHAPE)
        results.append(Value(tags, shape=holder.shape))
    return join(*results) if results else holder


def elements(value: Value) -> Value:
    """Return what iterating over a value yields."""
    found = []
    for thing in value.things:
        if isinstance(thing, Sequence):
            found.append(join(*thing.items) if thing.items else OPAQUE)
        elif isinstance(thing, Mapping):
            found += [constant(key) for key, _ in thing.items]
        elif isinstance(thing, Cache):
            found.append(of(thing))
        elif isinstance(thing, Instance | Module):
            found.append(OPAQUE)
    if value.open or not found:
        shape = value.shape[1:] if value.shape else None
        found.append(tagged(value.tags & ~Tag.KEYS, shape))
    return join(*found)
