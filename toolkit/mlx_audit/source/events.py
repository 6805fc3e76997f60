"""What happens to values as a step runs, and the rules that judge it."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from mlx_audit.source.conditions import text_of
from mlx_audit.source.tags import Tags, union
from mlx_audit.source.values import Value

if TYPE_CHECKING:
    from mlx_audit.source.machine import Frame


@dataclass(frozen=True)
class Finding:
    """What a rule says of an event: a hazard if it has a code, else a safe consumer.

    After a hazard, what it returned is not followed: one mistake is told once. `goes_on` says that it is followed.
    """

    code: str
    kind: str
    what: str
    goes_on: bool = False


@dataclass(frozen=True)
class Event:
    """Something that happens at a node."""

    node: ast.AST
    frame: Frame

    @property
    def text(self) -> str:
        """The node as source text."""
        return text_of(self.node)


@dataclass(frozen=True)
class Called(Event):
    """Something that is not read is called: `target` is its dotted name, or `.name` for a method of a value."""

    node: ast.expr
    target: str
    receiver: Value
    positional: tuple[Value, ...]
    keywords: dict[str, Value]

    def argument(self, index: int, name: str) -> Value | None:
        """Return an argument by place or by name."""
        if name in self.keywords:
            return self.keywords[name]
        return self.positional[index] if index < len(self.positional) else None

    @property
    def tags(self) -> Tags:
        """All that goes in by arguments."""
        return union(value.all_tags() for value in (*self.positional, *self.keywords.values()))


@dataclass(frozen=True)
class Rotated(Event):
    """A class or function that is read, and named as RoPE is, is called with an offset."""

    offset: Value


@dataclass(frozen=True)
class Tested(Event):
    """Python asks a value whether it is true."""

    value: Value


@dataclass(frozen=True)
class Sliced(Event):
    """A value is indexed by slices and other indices; `tail` says that keys are counted from the buffer's end."""

    base: Value
    lower: tuple[Value, ...]
    upper: tuple[Value, ...]
    indices: tuple[Value, ...]
    tail: bool


@dataclass(frozen=True)
class Combined(Event):
    """Two values meet in an operator."""

    operator: str
    left: Value
    right: Value


@dataclass(frozen=True)
class Formatted(Event):
    """A value is made into text."""

    value: Value


@dataclass(frozen=True)
class Stored(Event):
    """A value is kept beyond the step: on a module, in a global."""

    place: str
    value: Value
    memo: bool


@dataclass(frozen=True)
class Kept(Event):
    """A value is kept on a cache: one of mlx-lm's, or one of the model's own (`own`)."""

    name: str
    value: Value
    own: bool


@dataclass(frozen=True)
class Memoized(Event):
    """A memoizing function is called."""

    name: str
    value: Value


EventType = TypeVar("EventType", bound=Event)
_RULES: dict[type[Event], list[Callable[[Any], Finding | None]]] = {}


def rule(
    event: type[EventType],
) -> Callable[[Callable[[EventType], Finding | None]], Callable[[EventType], Finding | None]]:
    """Register a function that judges events of one type."""

    def register(judge: Callable[[EventType], Finding | None]) -> Callable[[EventType], Finding | None]:
        _RULES.setdefault(event, []).append(judge)
        return judge

    return register


def findings(event: Event) -> Iterator[Finding]:
    """Yield what the rules say of an event."""
    for judge in _RULES.get(type(event), []):
        finding = judge(event)
        if finding is not None:
            yield finding
