"""Indexing: of sequences, dictionaries, shapes, caches and arrays."""

from __future__ import annotations

import ast

from mlx_audit.source.arguments import Arguments
from mlx_audit.source.attributes import bind
from mlx_audit.source.events import Sliced
from mlx_audit.source.machine import Frame, Machine
from mlx_audit.source.resolution import find_member
from mlx_audit.source.tags import POSITIONS, Tag
from mlx_audit.source.values import (
    OPAQUE,
    SIZE,
    Cache,
    Class,
    Dims,
    External,
    Function,
    Instance,
    Mapping,
    Method,
    Module,
    Sequence,
    Thing,
    Value,
    constant,
    join,
    of,
    sequence,
    tagged,
)


def sliced(machine: Machine, node: ast.Subscript, base: Value, frame: Frame) -> Sliced:
    """Run the index of a subscript."""
    lower: list[Value] = []
    upper: list[Value] = []
    indices: list[Value] = []
    for part in _parts(node):
        if isinstance(part, ast.Slice):
            lower += [machine.value(part.lower, frame)] if part.lower and not _from_end(part.lower) else []
            ends = [part.lower] if part.lower and _from_end(part.lower) else []
            ends += [end for end in (part.upper, part.step) if end]
            upper += [machine.value(end, frame) for end in ends]
        else:
            indices.append(machine.value(part, frame))
    return Sliced(
        node, frame, base, tuple(lower), tuple(upper), tuple(indices), _tail(machine, node, base, frame)
    )


def _tail(machine: Machine, node: ast.Subscript, base: Value, frame: Frame) -> bool:
    """Return whether rows of a cache's buffer are counted from its end, as the last ones written were in eager code."""
    for part, size in _along(base, node):
        if size.has(Tag.LENGTH):
            bounds = [part.lower, part.upper] if isinstance(part, ast.Slice) else [part]
            counted = [machine.value(bound, frame) for bound in bounds if bound and _from_end(bound)]
            if any(not bound.has(Tag.LENGTH) for bound in counted):
                return True
    return False


def _along(base: Value, node: ast.Subscript) -> list[tuple[ast.expr, Value]]:
    """Return each part of an index with the size of its axis, as far as these are known."""
    shape = base.shape
    if shape is None and base.has(Tag.KEYS):
        shape = (SIZE, SIZE, tagged(Tag.SHAPE | Tag.LENGTH), SIZE)
    parts = [part for part in _parts(node) if not _is_none(part)]
    if shape is None or len(parts) > len(shape) + 1:
        return []
    first = next((index for index, part in enumerate(parts) if _is_ellipsis(part)), len(parts))
    last = parts[first + 1 :]
    return [
        *zip(parts[:first], shape, strict=False),
        *zip(last, shape[len(shape) - len(last) :], strict=False),
    ]


def _parts(node: ast.Subscript) -> list[ast.expr]:
    return node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]


def _from_end(bound: ast.expr) -> bool:
    return isinstance(bound, ast.UnaryOp) and isinstance(bound.op, ast.USub)


def item_of(machine: Machine, node: ast.Subscript, base: Value, event: Sliced, frame: Frame) -> Value:
    """Return what a subscript yields."""
    found = [_of_thing(machine, node, thing, event, frame) for thing in base.things]
    if base.open or not found:
        found.append(_of_array(base, node, event))
    return (
        join(*(one for one in found if one is not None)) if any(one is not None for one in found) else OPAQUE
    )


def _of_thing(
    machine: Machine, node: ast.Subscript, thing: Thing, event: Sliced, frame: Frame
) -> Value | None:
    if isinstance(thing, Sequence):
        return _of_sequence(machine, node, thing, event, frame)
    if isinstance(thing, Dims):
        return _of_dims(node, thing, event)
    if isinstance(thing, Mapping):
        return _of_mapping(thing, event)
    if isinstance(thing, Cache):
        return of(thing)
    if isinstance(thing, Instance):
        return _of_instance(machine, node, thing, event, frame)
    if isinstance(thing, Module):
        return of(thing) if not thing.arguments else join(*thing.arguments)
    if isinstance(thing, Class | External | Function | Method):  # a generic class, `x.at[…]`
        return of(thing)
    return None


def _of_sequence(
    machine: Machine, node: ast.Subscript, thing: Sequence, event: Sliced, frame: Frame
) -> Value:
    if not thing.items:
        return OPAQUE if event.indices else of(thing)
    if isinstance(node.slice, ast.Slice):
        bounds = [
            machine.value(bound, frame).constant() if bound else None
            for bound in (node.slice.lower, node.slice.upper, node.slice.step)
        ]
        given = [bound for bound in (node.slice.lower, node.slice.upper, node.slice.step) if bound]
        exact = thing.exact and all(isinstance(b, int) for b in bounds if b is not None)
        exact = exact and len([b for b in bounds if b is not None]) == len(given)
        if not exact:
            return sequence(thing.items, exact=False)
        low, high, step = (bound if isinstance(bound, int) else None for bound in bounds)
        return sequence(thing.items[low:high:step]) if step != 0 else OPAQUE
    index = event.indices[0].constant() if event.indices else None
    if thing.exact and isinstance(index, int) and -len(thing.items) <= index < len(thing.items):
        return thing.items[index]
    return join(*thing.items)


def _of_dims(node: ast.Subscript, thing: Dims, event: Sliced) -> Value:
    """Return one size of an array of which the shape was not followed."""
    if isinstance(node.slice, ast.Slice):
        return of(Dims(thing.tags & ~Tag.KEYS), tags=Tag.SHAPE)
    index = event.indices[0].constant() if event.indices else None
    return size(thing, length=index in (2, -2))


def size(thing: Dims, length: bool) -> Value:
    """Return a size of such an array; `length` says that it may be the key length."""
    tags = Tag.SHAPE
    if length and thing.tags & Tag.KEYS and not thing.tags & Tag.OWN:
        tags |= Tag.LENGTH
    if thing.tags & Tag.GROWN:
        tags |= Tag.HELD
    return tagged(tags)


def _of_mapping(thing: Mapping, event: Sliced) -> Value:
    key = event.indices[0].constant() if event.indices else None
    items = dict(thing.items)
    if isinstance(key, str) and key in items:
        return items[key]
    held = [*items.values(), *([thing.rest] if thing.rest else [])]
    return join(*held) if held else tagged(Tag.UNKNOWN)


def _of_instance(
    machine: Machine, node: ast.Subscript, thing: Instance, event: Sliced, frame: Frame
) -> Value:

    record = machine.record(thing)
    member = find_member(machine, record.cls, "__getitem__")
    if member is not None:
        method = bind(machine, member, of(thing), record.cls, node, frame)
        return machine.call(method, Arguments(event.indices or (OPAQUE,)), node, frame)
    key = event.indices[0].constant() if event.indices else None
    return machine.attribute(of(thing), key, node, frame) if isinstance(key, str) else OPAQUE


def _of_array(base: Value, node: ast.Subscript, event: Sliced) -> Value:
    tags = base.tags
    for index in event.indices:
        tags |= index.tags & (POSITIONS | Tag.DATA | Tag.KEYS | Tag.MASK | Tag.OWN | Tag.GROWN)
    if tags & Tag.DATA and not base.has(Tag.MASK):
        tags &= ~POSITIONS
    if event.indices and base.has(Tag.KEYS) and any(index.has(Tag.DATA) for index in event.indices):
        tags &= ~Tag.KEYS
    return tagged(tags, _shape(base, node, event))


def _shape(base: Value, node: ast.Subscript, event: Sliced) -> tuple[Value, ...] | None:
    """Return the shape of what indexing an array yields."""
    if base.shape is None:
        return None
    parts = _parts(node)
    indices = iter(event.indices)
    taken = [part for part in parts if not _is_none(part) and not _is_ellipsis(part)]
    if len(taken) > len(base.shape) or sum(map(_is_ellipsis, parts)) > 1:
        return None
    axis = 0
    sizes: list[Value] = []
    for part in parts:
        if _is_ellipsis(part):
            skipped = len(base.shape) - len(taken)
            sizes += base.shape[axis : axis + skipped]
            axis += skipped
        elif _is_none(part):
            sizes.append(constant(1))
        elif isinstance(part, ast.Slice):
            whole = part.lower is None and part.upper is None and part.step is None
            sizes.append(base.shape[axis] if whole else _part_of(base.shape[axis]))
            axis += 1
        else:
            axis += 1
        if not isinstance(part, ast.Slice):
            index = next(indices, OPAQUE)
            if index.tags & ~(Tag.SHAPE | Tag.HELD | Tag.LENGTH | Tag.BEFORE):
                return None
    return (*sizes, *base.shape[axis:])


def _part_of(whole: Value) -> Value:
    return SIZE if whole.tags or whole.constant() != 1 else constant(1)


def _is_none(part: ast.expr) -> bool:
    return isinstance(part, ast.Constant) and part.value is None


def _is_ellipsis(part: ast.expr) -> bool:
    return isinstance(part, ast.Constant) and part.value is ...
