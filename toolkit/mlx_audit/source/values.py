"""What the interpreter knows of a value: its tags, and what it may be."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeAlias

from mlx_audit.source.tags import Tag, Tags, union

if TYPE_CHECKING:
    from mlx_audit.source.modules import SourceModule


@dataclass(frozen=True, slots=True)
class Constant:
    """A literal; its type tells 1 from True and 1.0."""

    type: str
    value: object


@dataclass(frozen=True, slots=True)
class Sequence:
    """A list, tuple, or the like. Not `exact`: any number of elements, each like the only item."""

    items: tuple[Value, ...]
    exact: bool
    depth: int


@dataclass(frozen=True, slots=True)
class Mapping:
    """A dictionary with the keys that are known; `rest` is what lies under any other."""

    items: tuple[tuple[str, Value], ...]
    rest: Value | None
    depth: int


@dataclass(frozen=True, slots=True)
class Dims:
    """The shape of an array of which the shape was not followed."""

    tags: Tags


@dataclass(frozen=True, slots=True)
class External:
    """Something that is not read: a name in mlx, numpy, the standard library, mlx-lm's caches."""

    name: str


@dataclass(frozen=True, slots=True)
class Namespace:
    """A module that is read."""

    module: SourceModule


@dataclass(frozen=True, slots=True)
class Class:
    """A class that is read."""

    module: SourceModule
    node: ast.ClassDef


@dataclass(frozen=True, slots=True)
class Function:
    """A function that is read: `owner` is the class that holds it, `receiver` what it is bound to."""

    module: SourceModule
    node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
    owner: Class | None = None
    receiver: Value | None = None
    closure: int = -1


@dataclass(frozen=True, slots=True)
class Method:
    """A method of a value that is not read: of an array, a list, a cache."""

    receiver: Value
    name: str


@dataclass(frozen=True, slots=True)
class Partial:
    """What `functools.partial` returned."""

    target: Value
    positional: tuple[Value, ...]
    keywords: tuple[tuple[str, Value], ...]


@dataclass(frozen=True, slots=True)
class Instance:
    """An object of a class that is read; the number leads to its record on the heap."""

    number: int


@dataclass(frozen=True, slots=True)
class Module:
    """An object of a class of `mlx.nn`, with what it was built from."""

    name: str
    arguments: tuple[Value, ...] = ()


@dataclass(frozen=True, slots=True)
class Cache:
    """A cache of mlx-lm, or an array or cache inside one."""


Thing: TypeAlias = (
    Constant | Sequence | Mapping | Dims | External | Namespace | Class | Function | Method | Partial
    | Instance | Module | Cache
)  # fmt: skip

_MOST_THINGS = 24
_DEEPEST = 5


@dataclass(frozen=True, slots=True)
class Value:
    """What is known of one value.

    Attributes:
        tags: Where it comes from.
        things: What it may be.
        open: Whether it may also be something that is not listed.
        shape: Its shape, if it is an array and the shape was followed.
    """

    tags: Tags = Tag.NONE
    things: frozenset[Thing] = frozenset()
    open: bool = True
    shape: tuple[Value, ...] | None = None

    def has(self, tag: Tags) -> bool:
        """Return whether it carries any of these tags."""
        return bool(self.tags & tag)

    def only(self) -> Thing | None:
        """Return the one thing that it can be, if there is but one."""
        if self.open or len(self.things) != 1:
            return None
        return next(iter(self.things))

    def constant(self) -> object:
        """Return the constant that it must be, else None."""
        thing = self.only()
        return thing.value if isinstance(thing, Constant) else None

    def without(self, tag: Tags) -> Value:
        """Return it without these tags."""
        return replace(self, tags=self.tags & ~tag)

    def all_tags(self) -> Tags:
        """Return its tags and those of what it holds."""
        tags = self.tags
        for thing in self.things:
            if isinstance(thing, Sequence):
                tags |= union(item.all_tags() for item in thing.items)
            elif isinstance(thing, Mapping):
                tags |= union(item.all_tags() for _, item in thing.items)
                tags |= thing.rest.all_tags() if thing.rest else Tag.NONE
        return tags


OPAQUE = Value()


def of(*things: Thing, tags: Tags = Tag.NONE) -> Value:
    """Return a value that is one of these things."""
    return Value(tags, frozenset(things), open=False)


def tagged(tags: Tags, shape: tuple[Value, ...] | None = None) -> Value:
    """Return a value of which only the origin is known."""
    return Value(tags, shape=shape)


def constant(value: object) -> Value:
    """Return a literal."""
    return of(Constant(type(value).__name__, value))


NOTHING = constant(None)
CACHE = of(Cache())
SIZE = tagged(Tag.SHAPE)


def sequence(items: Iterable[Value], exact: bool = True) -> Value:
    """Return a list or tuple of these; a deeply nested one becomes opaque."""
    items = tuple(items)
    if not exact and len(items) > 1:
        items = (join(*items),)
    depth = 1 + max((_depth(item) for item in items), default=0)
    if depth > _DEEPEST:
        return tagged(union(item.all_tags() for item in items) | Tag.UNKNOWN)
    if len(items) > 4 * _MOST_THINGS:
        items, exact = (join(*items),), False
    return of(Sequence(items, exact, depth))


def mapping(items: dict[str, Value], rest: Value | None = None) -> Value:
    """Return a dictionary of these."""
    held = [*items.values(), *([rest] if rest else [])]
    depth = 1 + max((_depth(item) for item in held), default=0)
    if depth > _DEEPEST:
        return tagged(union(item.all_tags() for item in held) | Tag.UNKNOWN)
    return of(Mapping(tuple(sorted(items.items(), key=lambda pair: pair[0])), rest, depth))


def _depth(value: Value) -> int:
    return max((thing.depth for thing in value.things if isinstance(thing, Sequence | Mapping)), default=0)


def join(*values: Value) -> Value:
    """Return what is either of these."""
    first = values[0] if values else OPAQUE
    if all(value == first for value in values[1:]):
        return first
    things = frozenset[Thing]().union(*(value.things for value in values))
    things = _merged(things)
    if len(things) > _MOST_THINGS:
        things = frozenset(thing for thing in things if not isinstance(thing, Constant | Sequence | Mapping))
        return Value(union(value.all_tags() for value in values), things)
    return Value(
        _joined_tags(values),
        things,
        any(value.open for value in values),
        _joined_shape([value.shape for value in values if value.open or value.shape]),
    )


def _joined_tags(values: tuple[Value, ...]) -> Tags:
    """Return the tags of either: all of them, but scores count as unmasked only if they are so on every way."""
    tags = union(value.tags for value in values)
    return tags if all(value.has(Tag.UNMASKED) for value in values) else tags & ~Tag.UNMASKED


def _merged(things: frozenset[Thing]) -> frozenset[Thing]:
    """Keep one inexact sequence in place of several sequences of different lengths."""
    sequences = [thing for thing in things if isinstance(thing, Sequence)]
    if len(sequences) < 2:
        return things
    rest = things - frozenset(sequences)
    if all(s.exact for s in sequences) and len({len(s.items) for s in sequences}) == 1:
        merged = sequence([join(*column) for column in zip(*(s.items for s in sequences), strict=True)])
    else:
        merged = sequence([item for s in sequences for item in s.items] or [], exact=False)
    return rest | merged.things


def _joined_shape(shapes: list[tuple[Value, ...] | None]) -> tuple[Value, ...] | None:
    known = [shape for shape in shapes if shape is not None]
    if not known or len(known) != len(shapes) or len({len(shape) for shape in known}) != 1:
        return None
    return tuple(join(*column) for column in zip(*known, strict=True))
