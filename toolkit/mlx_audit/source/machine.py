"""The interpreter's state: what was built, what was found, how much work is left."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from mlx_audit.source.arguments import Arguments
from mlx_audit.source.conditions import Conditions, Guard, merged, needed, possible, text_of_all
from mlx_audit.source.events import Event, Finding, findings
from mlx_audit.source.modules import Library, SourceModule
from mlx_audit.source.report import Consumer
from mlx_audit.source.values import OPAQUE, Class, Instance, Value

STEPS = 100_000
"""How many pieces of syntax are looked at before a file counts as too large to follow."""

DEEPEST_CALL = 24


class Exhausted(Exception):
    """The file asks for more work than is spent on one."""


@dataclass
class Record:
    """An object on the heap: its class, its attributes, and the conditions under which it was built."""

    cls: Class
    born: str
    guards: Conditions
    attributes: dict[str, Value] = field(default_factory=dict)
    held: set[str] = field(default_factory=set)
    places: dict[str, tuple[ast.expr, Frame]] = field(default_factory=dict)


@dataclass
class Frame:
    """One running function, class body or module."""

    module: SourceModule
    symbol: str
    names: dict[str, Value] = field(default_factory=dict)
    outer: Frame | None = None
    owner: Class | None = None
    receiver: Value | None = None
    globals: set[str] = field(default_factory=set)
    returned: list[Value] = field(default_factory=list)
    yielded: list[Value] = field(default_factory=list)
    ends: list[dict[str, Value]] = field(default_factory=list)
    leaving: list[dict[str, Value]] = field(default_factory=list)
    branches: int = 0
    rotation: bool = False
    number: int = -1

    def find(self, name: str) -> Value | None:
        """Return what a name is bound to here or in a function around it."""
        frame: Frame | None = self
        while frame is not None:
            if name in frame.names and name not in frame.globals:
                return frame.names[name]
            frame = frame.outer
        return None


class Machine:
    """Runs a model's source over abstract values, and notes who consumes the position.

    How a kind of expression or statement runs is a function registered in `EXPRESSIONS` or `STATEMENTS`; what those
    need of each other is a method here, which `Interpreter` implements.
    """

    def __init__(self, library: Library) -> None:
        self.library = library
        self.heap: list[Record] = []
        self.closures: list[Frame] = []
        self.found: dict[tuple[str, int, int, str, str], tuple[Consumer, dict[Conditions, None]]] = {}
        self.notes: dict[str, None] = {}
        self.memo: dict[object, tuple[Value, dict[str, Value]]] = {}
        self.running: list[object] = []
        self.guards: Conditions = ()
        self.phase = "model"
        self.steps = STEPS
        self.constants: dict[tuple[SourceModule, str], Value] = {}
        self.built: dict[object, Instance] = {}
        self.changed = False
        self.stopped = ""
        self.tested: list[ast.expr] = []

    def call(self, target: Value, arguments: Arguments, node: ast.expr, frame: Frame) -> Value:
        """Return what calling a value returns."""
        raise NotImplementedError

    def attribute(self, value: Value, name: str, node: ast.expr, frame: Frame) -> Value:
        """Return an attribute of a value."""
        raise NotImplementedError

    def assign(self, target: ast.expr, value: Value, frame: Frame, changed: bool = False) -> None:
        """Bind a target; `changed` says that what it holds was changed in place."""
        raise NotImplementedError

    def value(self, node: ast.expr, frame: Frame) -> Value:
        """Return what an expression is."""
        self.spend()
        run = EXPRESSIONS.get(type(node))
        return run(self, node, frame) if run else OPAQUE

    def block(self, body: list[ast.stmt], frame: Frame) -> bool:
        """Run statements; return whether control can reach their end."""
        guards = self.guards
        try:
            for line in body:
                self.spend()
                run = STATEMENTS.get(type(line))
                if run and not run(self, line, frame):
                    return False
            return True
        finally:
            self.guards = guards

    def spend(self) -> None:
        """Count one step."""
        self.steps -= 1
        if self.steps < 0:
            raise Exhausted

    def closure(self, frame: Frame) -> int:
        """Return the number under which a frame is kept for the functions defined in it."""
        if frame.number < 0:
            frame.number = len(self.closures)
            self.closures.append(frame)
        return frame.number

    def record(self, instance: Instance) -> Record:
        """Return the record of an object."""
        return self.heap[instance.number]

    @contextmanager
    def guarded(self, *guards: Guard) -> Iterator[None]:
        """Run under further conditions."""
        before = self.guards
        self.guards = before + tuple(guard for guard in guards if guard not in before)
        try:
            yield
        finally:
            self.guards = before

    def note(self, text: str, node: ast.AST, frame: Frame) -> None:
        """Note what could not be followed."""
        if self.phase == "step":
            self.notes.setdefault(f"{frame.module.file.name}:{getattr(node, 'lineno', 1)}: {text}")

    def tell(self, event: Event) -> bool:
        """Put an event to the rules; return whether one found a hazard after which nothing is followed."""
        if self.phase != "step":
            return False
        hazard = False
        for finding in findings(event):
            self.report(finding, event.node, event.frame)
            hazard = hazard or bool(finding.code and not finding.goes_on)
        return hazard

    def report(self, finding: Finding, node: ast.AST, frame: Frame) -> None:
        """Keep a finding, under the conditions that hold now."""
        if not possible(self.guards):
            return
        consumer = Consumer(
            finding.code,
            finding.kind,
            frame.module.file,
            getattr(node, "lineno", 1),
            getattr(node, "col_offset", 0) + 1,
            frame.symbol,
            finding.what,
        )
        self.found.setdefault(consumer.place, (consumer, {}))[1].setdefault(self.guards)

    def consumers(self) -> tuple[Consumer, ...]:
        """Return what was found: one consumer a place, with all the conditions under which it is reached."""
        return tuple(_conditional(*self.found[place]) for place in sorted(self.found))


def _conditional(consumer: Consumer, ways: dict[Conditions, None]) -> Consumer:
    """Return a consumer with the ways that lead to it."""
    few = merged(ways)
    if () in few:
        return consumer
    needs = sorted({need for way in few for need in [needed(way)] if need})
    return replace(consumer, when=" or ".join(dict.fromkeys(map(text_of_all, few))), needs=tuple(needs))


Expression = Callable[[Machine, Any, Frame], Value]
Statement = Callable[[Machine, Any, Frame], bool]
EXPRESSIONS: dict[type[ast.expr], Expression] = {}
STATEMENTS: dict[type[ast.stmt], Statement] = {}


def expression(*types: type[ast.expr]) -> Callable[[Expression], Expression]:
    """Register how expressions of these types run."""

    def register(run: Expression) -> Expression:
        EXPRESSIONS.update(dict.fromkeys(types, run))
        return run

    return register


def statement(*types: type[ast.stmt]) -> Callable[[Statement], Statement]:
    """Register how statements of these types run; each returns whether control can pass it."""

    def register(run: Statement) -> Statement:
        STATEMENTS.update(dict.fromkeys(types, run))
        return run

    return register
