"""Calls of what is not read: MLX, numpy, builtins, methods of arrays and containers, caches."""

from __future__ import annotations

import ast

from mlx_audit.source import arrays, builtin, containers
from mlx_audit.source.arguments import Arguments
from mlx_audit.source.attributes import CACHED, POSITION
from mlx_audit.source.events import Called, Kept
from mlx_audit.source.machine import Frame, Machine
from mlx_audit.source.modules import CACHES, MODELS
from mlx_audit.source.tags import POSITIONS, STATE, Tag
from mlx_audit.source.values import (
    CACHE,
    NOTHING,
    OPAQUE,
    SIZE,
    Cache,
    Constant,
    Dims,
    Function,
    Instance,
    Mapping,
    Module,
    Partial,
    Sequence,
    Value,
    constant,
    of,
    sequence,
    tagged,
)


def mask(length: Value = SIZE) -> Value:
    """Return what a fixed cache makes: a boolean mask of rank 4, over its whole buffer."""
    return tagged(Tag.MASK, (SIZE, constant(1), length, tagged(Tag.SHAPE | Tag.LENGTH)))


MASKS = (f"{MODELS}.base.create_attention_mask", f"{MODELS}.base.create_ssm_mask")
_WRAPPING = (
    "mlx.core.compile",
    "mlx.core.checkpoint",
    "mlx.core.custom_function",
    "mlx.core.vmap",
    "mlx.nn.utils.checkpoint",
)


def call_external(machine: Machine, name: str, arguments: Arguments, node: ast.expr, frame: Frame) -> Value:
    """Return what a name that is not read returns."""
    event = _event(node, frame, name, OPAQUE, arguments)
    if machine.tell(event):
        return OPAQUE
    if name.startswith("builtins."):
        return builtin.run(machine, event, arguments)
    if name.startswith(CACHES):
        return CACHE
    if name == "functools.partial" and arguments.positional:
        return of(Partial(arguments.positional[0], arguments.positional[1:], arguments.keywords))
    if name in _WRAPPING and arguments.positional:
        return arguments.positional[0]
    last = name.rpartition(".")[2]
    if name.startswith("mlx.nn") and last[:1].isupper():
        return of(Module(name, arguments.positional if last == "Sequential" else ()))
    _call_passed_functions(machine, arguments, node, frame)
    if name.startswith("mlx."):
        return arrays.result(last, arguments.positional, event.keywords)
    _note_lost(machine, name, arguments, node, frame)
    return tagged(arrays.absorbed(arguments.tags() & STATE))


def call_opaque(
    machine: Machine,
    module: Module | None,
    arguments: Arguments,
    node: ast.expr,
    frame: Frame,
    unknown: bool = False,
) -> Value:
    """Return what a layer of `mlx.nn` returns, or something of which nothing is known."""
    name = module.name if module else "?"
    if machine.tell(_event(node, frame, name, OPAQUE, arguments)):
        return OPAQUE
    if module and module.arguments:
        result = arguments
        for layer in module.arguments:
            result = Arguments((machine.call(layer, result, node, frame),))
        return result.positional[0]
    _call_passed_functions(machine, arguments, node, frame)
    if unknown:
        _note_lost(machine, ast.unparse(node)[:80], arguments, node, frame)
    tags = arrays.absorbed(arguments.tags() & STATE)
    if tags and module:
        tags = (tags | Tag.DATA) & ~(POSITIONS | Tag.MASK)
    first = arguments.positional[0].shape if arguments.positional else None
    if first is None or module is None or "Conv" in name:
        return tagged(tags)
    if name.endswith("Embedding"):
        return tagged(tags, (*first, OPAQUE))
    return tagged(tags, (*first[:-1], OPAQUE))


def call_method(
    machine: Machine, receiver: Value, name: str, arguments: Arguments, node: ast.expr, frame: Frame
) -> Value:
    """Return what a method of a value that is not read returns."""
    event = _event(node, frame, f".{name}", receiver, arguments)
    if machine.tell(event):
        return OPAQUE
    thing = receiver.only()
    if isinstance(thing, Cache):
        return _cache_method(machine, name, event)
    if isinstance(thing, Sequence | Mapping | Constant | Dims):
        return containers.method(thing, name, arguments)
    _call_passed_functions(machine, arguments, node, frame)
    if not receiver.tags and not arguments.tags():
        return OPAQUE
    return arrays.result(name, (receiver, *arguments.positional), event.keywords)


def _cache_method(machine: Machine, name: str, event: Called) -> Value:

    if name == "update_and_fetch":
        machine.tell(Kept(event.node, event.frame, name, OPAQUE, own=False))
    if name in ("update_and_fetch", "keys_and_values"):
        return sequence([CACHED, CACHED])
    if name == "make_mask":
        return mask(event.positional[0] if event.positional else SIZE)
    if name == "size":
        return POSITION
    if name == "empty":
        return constant(False)
    return NOTHING


def _event(node: ast.expr, frame: Frame, target: str, receiver: Value, arguments: Arguments) -> Called:
    more = tuple(value for value in (arguments.rest, arguments.others) if value is not None)
    return Called(node, frame, target, receiver, (*arguments.positional, *more), dict(arguments.keywords))


def _call_passed_functions(machine: Machine, arguments: Arguments, node: ast.expr, frame: Frame) -> None:
    """Call functions that are passed to something that is not read, with all else that is passed."""
    for value in arguments.values():
        callable_ = [thing for thing in value.things if isinstance(thing, Function | Partial)]
        if callable_:
            tags = arrays.absorbed(arguments.tags() & STATE)
            machine.call(of(*callable_), Arguments(rest=tagged(tags)), node, frame)


def _note_lost(machine: Machine, name: str, arguments: Arguments, node: ast.expr, frame: Frame) -> None:
    """Note that the position, or a cache, goes where it cannot be followed."""
    cache = any(isinstance(t, Cache | Instance) for value in arguments.values() for t in value.things)
    if arguments.tags() & (Tag.POSITION | Tag.HELD) or (cache and not name.startswith(("mlx.", "math."))):
        machine.note(f"the position or a cache goes into {name}, which is not read", node, frame)


def mask_of(
    machine: Machine, function: Function, arguments: Arguments, node: ast.expr, frame: Frame
) -> Value | None:
    """Return the mask of mlx-lm's own mask functions: what a fixed cache makes, always an array."""
    name = f"{function.module.name}.{getattr(function.node, 'name', '')}"
    if function.owner or name not in MASKS or function.module.name in machine.library.overlay:
        return None
    machine.tell(_event(node, frame, name, OPAQUE, arguments))
    cache = (
        arguments.positional[1]
        if len(arguments.positional) > 1
        else dict(arguments.keywords).get("cache", NOTHING)
    )
    if cache == NOTHING:
        return NOTHING
    queries = arguments.positional[0].shape if arguments.positional else None
    return mask(queries[1] if queries and len(queries) > 1 else SIZE)
