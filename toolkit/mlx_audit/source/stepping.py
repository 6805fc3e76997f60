"""From a model file to one step: its model is built, its caches are made, one token goes in."""

from __future__ import annotations

import ast

from mlx_audit.source.arguments import Arguments
from mlx_audit.source.construction import construct
from mlx_audit.source.events import Finding
from mlx_audit.source.machine import Frame, Machine
from mlx_audit.source.modules import SourceModule
from mlx_audit.source.resolution import find_member, lookup
from mlx_audit.source.tags import Tag
from mlx_audit.source.values import (
    CACHE,
    OPAQUE,
    SIZE,
    Cache,
    Class,
    Constant,
    Instance,
    Sequence,
    Value,
    of,
    sequence,
    tagged,
)

TOKENS = tagged(Tag.DATA, (SIZE, of(Constant("int", 1), tags=Tag.SHAPE)))
"""The ids that go into a step of one token."""

_ROUNDS = 8


class NoModel(Exception):
    """The file defines no model."""


def run_model(machine: Machine, module: SourceModule) -> None:
    """Build the model of a file, and run steps until another one tells nothing new.

    Raises:
        NoModel: the file has no class Model.
    """
    if "Model" not in module.bindings:
        raise NoModel(f"{module.file}:1: defines no class Model")
    classes = [thing for thing in lookup(machine, module, "Model").things if isinstance(thing, Class)]
    if not classes:
        raise NoModel(f"{module.file}:1: what it calls Model is no class that can be read")
    frame = Frame(module, "Model")
    node = ast.copy_location(ast.Name("Model"), classes[0].node)
    model = construct(machine, classes[0], Arguments((OPAQUE,)), node, frame)
    machine.phase = "cache"
    caches = _caches(machine, model, classes[0], node, frame)
    machine.phase = "step"
    for _ in range(_ROUNDS):
        machine.memo.clear()
        machine.changed = False
        machine.call(model, Arguments((TOKENS,), (("cache", caches),)), node, frame)
        if not machine.changed:
            break
    else:
        machine.stopped = f"{module.file}:1: what its objects hold does not settle"
    _name_own_caches(machine)


def _caches(machine: Machine, model: Value, cls: Class, node: ast.expr, frame: Frame) -> Value:
    """Return the caches of a step: those of fixed capacity that the model makes itself, else its own."""
    own = find_member(machine, cls, "new_fixed_capacity_cache") is not None
    name = "new_fixed_capacity_cache" if own else "make_cache"
    passed = Arguments((OPAQUE,)) if own else Arguments()
    made = machine.call(machine.attribute(model, name, node, frame), passed, node, frame)
    entries = []
    for thing in made.things:
        if isinstance(thing, Sequence):
            entries += list(thing.items)
    held = [thing for entry in entries for thing in entry.things if isinstance(thing, Cache | Instance)]
    return sequence([of(*held)] if held else [CACHE], exact=False)


OWN_CACHE = "own cache class"
"""Kind of the finding that names a class; what it does on the host are findings of their own."""


def _name_own_caches(machine: Machine) -> None:
    """Report each cache class of the model's own that keeps something on the host."""
    own = [record for record in machine.heap if record.born == "cache"]
    for record in own:
        held = sorted(record.held)
        grown = [name for name, value in record.attributes.items() if value.has(Tag.GROWN)]
        if held or grown:
            what = f"{record.cls.node.name} is a cache class of the model's own; it holds " + ", ".join(
                held + grown
            )
            machine.report(
                Finding("SRC006", OWN_CACHE, what),
                record.cls.node,
                Frame(record.cls.module, record.cls.node.name),
            )
