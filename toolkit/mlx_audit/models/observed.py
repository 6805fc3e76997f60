"""What a built model shows of itself: its caches, which layer each belongs to, and where it keeps its arguments."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.models import cache as native

from mlx_audit.manifests import CacheSpec
from mlx_audit.manifests.observations import shape
from mlx_audit.models.live import spec_of

NONE = CacheSpec("none")
"""What a layer without an entry of its own keeps."""

_DEPTH = 3
"""Modules below the model in which arguments are looked for."""

_READS = ("item", "tolist", "__int__", "__float__", "__bool__", "__index__", "__array__")

Form = tuple[str, ...]
"""What makes layers alike: class, names of the parameters, kind of cache."""


@dataclass(frozen=True)
class Observed:
    """One built model.

    Attributes:
        model: The model; its weights are lazy.
        entries: What `make_cache()` returned.
        layers: One cache a layer, `none` included; None where nobody knows which is whose.
        before: Entries ahead of the layers' own that belong to none of them.
        count: How many layers there are.
    """

    model: nn.Module
    entries: list[CacheSpec]
    layers: list[CacheSpec] | None
    before: list[CacheSpec]
    count: int

    @property
    def layer_forms(self) -> list[Form]:
        """The form of each layer."""
        layers = list(getattr(self.model, "layers", ()))
        known = self.layers if self.layers is not None and len(self.layers) == len(layers) else None
        kinds = [shape(spec) for spec in known] if known is not None else [""] * len(layers)
        return [_form(layer, kind) for layer, kind in zip(layers, kinds, strict=True)]

    @property
    def forms(self) -> set[Form]:
        """The different forms of layers and entries; and whether there are layers without an entry."""
        found = {(form[0], *form[2:]) for form in self.layer_forms}
        found |= {("an entry", shape(spec)) for spec in self.entries}
        return found | ({("layers without an entry",)} if len(self.entries) < self.count else set())


def observe(model: nn.Module) -> Observed:
    """Return what a model shows; nothing is evaluated.

    Where there are more or fewer entries than layers, the forward is run lazily, to see which layer is given which
    entry.
    """
    caches = native.make_prompt_cache(model)
    entries = [spec_of(entry) for entry in caches]
    layers = getattr(model, "layers", None)
    count = len(layers) if isinstance(layers, list | tuple) else len(entries)
    if count == len(entries):
        return Observed(model, entries, entries, [], count)
    owners = _owners(model, caches)
    if owners is None:
        return Observed(model, entries, None, [], count)
    first = min((owner for owner in owners if owner is not None), default=0)
    owned = [NONE if owner is None else entries[owner] for owner in owners]
    if [owner for owner in owners if owner is not None] != list(range(first, len(entries))):
        # More than one entry a layer, or none that a layer is given: each entry counts as a layer.
        return Observed(model, entries, entries, [], len(entries))
    return Observed(model, entries, owned, entries[:first], count)


def run_lazily(model: nn.Module, caches: Sequence[Any]) -> None:
    """Run the model's own forward on two tokens; what it raises gets out."""
    model(mx.zeros((1, 2), mx.int32), cache=caches)


def _owners(model: nn.Module, caches: Sequence[Any]) -> list[int | None] | None:
    """Return the entry that each layer is the first to be given; None where the forward cannot be run."""
    layers = list(model.layers)
    given: dict[int, int] = {}
    index = {id(entry): at for at, entry in enumerate(caches)}

    def note(layer: nn.Module, values: Sequence[Any]) -> None:
        found = [index[id(value)] for value in values if id(value) in index]
        if found and id(layer) not in given and found[0] not in given.values():
            given[id(layer)] = found[0]

    try:
        with _watched({type(layer) for layer in layers}, note), _unread():
            run_lazily(model, caches)
    except Exception:
        return None
    return [given.get(id(layer)) for layer in layers]


@contextmanager
def _watched(classes: set[type], note: Callable[[Any, Sequence[Any]], None]) -> Iterator[None]:
    """Note what each instance of these classes is called with."""
    with ExitStack() as undo:
        for cls in classes:
            own = cls.__dict__.get("__call__")
            if own is None:
                continue

            def call(self: Any, *values: Any, _own: Any = own, **named: Any) -> Any:
                note(self, [*values, *named.values()])
                return _own(self, *values, **named)

            cls.__call__ = call  # type: ignore[method-assign]
            undo.callback(setattr, cls, "__call__", own)
        yield


@contextmanager
def _unread() -> Iterator[None]:
    """Make reading an array's value on the host an error: at full size it would compute the whole model."""

    def refuse(*_: Any, **__: Any) -> Any:
        raise RuntimeError("the model reads a value on the host")

    with ExitStack() as undo:
        places: list[tuple[Any, str]] = [(mx.array, name) for name in _READS]
        for owner, name in [*places, (mx, "eval"), (mx, "async_eval")]:
            undo.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, refuse)
        yield


def _form(layer: Any, kind: str) -> Form:
    leaves = dict(tree_flatten(layer.parameters())) if layer else {}
    names = {re.sub(r"\d+", "#", name) for name in leaves}
    return (type(layer).__name__, kind, *sorted(names))


def argument_objects(model: nn.Module, arguments: Any) -> dict[str, Any]:
    """Return the objects that can be a model's arguments, by their path from it; `args` are those it was built with."""
    found = {"args": arguments}
    waiting: list[tuple[str, Any]] = [("", model)]
    while waiting:
        path, owner = waiting.pop(0)
        for name, value in _attributes(owner):
            where = f"{path}{name}"
            if is_dataclass(value) and not isinstance(value, type):
                found.setdefault(where, value)
            if where.count(".") < _DEPTH and (isinstance(value, nn.Module) or is_dataclass(value)):
                waiting.append((f"{where}.", value))
    return found


def _attributes(owner: Any) -> list[tuple[str, Any]]:
    if isinstance(owner, nn.Module):
        items = [*vars(owner).items(), *owner.items()]
        return [(name, value) for name, value in items if not name.startswith("_")]
    return [(field.name, getattr(owner, field.name, None)) for field in fields(owner)]
