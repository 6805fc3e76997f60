"""What a module holds, as data: its parameters as named slots, and a snapshot that shows and undoes changes."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn

from mlx_audit.adapters.model_code import View, inner, is_model_code, roots
from mlx_audit.caches import handle

_PLAIN = frozenset((bool, int, float, complex, str, bytes, type(None)))
_LEAVES = _PLAIN | {mx.array}
_CONTAINERS = (dict, list)
_HOLDERS = (dict, list, tuple, View)
_ABSENT = object()
_ARRAY = frozenset((mx.array,))


class Slot(NamedTuple):
    """A place in the module tree that holds one parameter."""

    path: str
    container: Any
    key: Any


def parameter_slots(model: nn.Module) -> list[Slot]:
    """Return the place of every parameter, sorted by path.

    A compiled step tells parameters apart by their order alone, so it must not be that of the attributes, which
    deleting one and setting it anew changes. Parameters are MLX's own notion: arrays in the module tree whose
    attribute name does not start with `_`.
    """
    slots: list[Slot] = []
    seen: set[int] = set()
    # Depth first with an explicit stack: this walk runs before every compiled call.
    stack: list[tuple[str, Any]] = [("", model)]
    while stack:
        prefix, container = stack.pop()
        if id(container) in seen:
            continue
        seen.add(id(container))
        is_module = isinstance(container, nn.Module)
        for key, value in container.items() if isinstance(container, dict) else enumerate(container):
            if is_module and str(key)[0] == "_":
                continue
            if type(value) is mx.array:
                slots.append(Slot(f"{prefix}{key}", container, key))
            elif isinstance(value, _CONTAINERS):
                stack.append((f"{prefix}{key}.", value))
    slots.sort(key=operator.itemgetter(0))
    return slots


class Parameters:
    """A model's parameters, found quickly again and again: the module tree is walked anew only where it changed.

    Args:
        model: Its parameters may be replaced or changed, and its modules exchanged, between two calls.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._slots: list[Slot] = []
        self._containers: list[Any] = []
        self._lengths: list[int] = []
        # Containers and keys of the parameters; and of everything else, with what was there.
        self._places: tuple[list[Any], list[Any]] = ([], [])
        self._others: tuple[list[Any], list[Any], list[Any]] = ([], [], [])

    def slots(self) -> list[Slot]:
        """Return what `parameter_slots` returns."""
        self.arrays()
        return self._slots

    def arrays(self) -> list[mx.array]:
        """Return the parameters as they are now, in the order of `slots`."""
        # Nothing came or went where each container has its old length and still holds what it held: an array where
        # an array was, and the very same object elsewhere. That takes a small part of a walk.
        containers, keys, values = self._others
        try:
            if (
                self._containers
                and self._lengths == list(map(len, self._containers))
                and all(map(operator.is_, map(operator.getitem, containers, keys), values))
            ):
                arrays: list[Any] = list(map(operator.getitem, *self._places))
                if set(map(type, arrays)) <= _ARRAY:
                    return arrays
        except LookupError:
            pass
        self._walk()
        arrays = list(map(operator.getitem, *self._places))
        return arrays

    def _walk(self) -> None:
        self._slots = parameter_slots(self._model)
        self._containers = list(_tree(self._model))
        self._lengths = list(map(len, self._containers))
        self._places = ([slot.container for slot in self._slots], [slot.key for slot in self._slots])
        parameters = {(id(slot.container), slot.key) for slot in self._slots}
        others = [
            (container, key, value)
            for container in self._containers
            for key, value in _items(container)
            if (id(container), key) not in parameters
        ]
        self._others = (
            [container for container, _, _ in others],
            [key for _, key, _ in others],
            [value for _, _, value in others],
        )


def _tree(model: nn.Module) -> Iterator[Any]:
    """Yield each dict and list in which parameters are looked for."""
    seen: set[int] = set()
    stack: list[Any] = [model]
    while stack:
        container = stack.pop()
        if id(container) not in seen:
            seen.add(id(container))
            yield container
            values = container.values() if isinstance(container, dict) else container
            stack += [value for value in values if isinstance(value, _CONTAINERS)]


class Change(NamedTuple):
    """One attribute, key or element that is not what it was."""

    path: str
    container: Any
    key: Any
    old: Any
    new: Any

    @property
    def of_code(self) -> bool:
        """Whether it lies in a global, a class attribute or a closure, and not on the module."""
        return self.path.startswith(("globals of ", "class "))

    @property
    def concerns_arrays(self) -> bool:
        """Whether an array came, went or was replaced, inside a container too."""
        return _has_array(self.old) or _has_array(self.new)


class ModuleState:
    """A snapshot of everything that a model's code can write: arrays, Python values, and containers of both.

    That is what hangs on its modules, and the globals, class attributes and closures of their code. The forward may
    write there (a memoized mask, a position counter). While it is traced such a write leaves a placeholder behind;
    `changes` names what was written and `undo` puts it back.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._types: list[type]
        self._containers: list[tuple[str, Any, Any]]
        last = _reusable[0] if _reusable else None
        if last is not None and last._model is model and last._is_current():
            self._containers, self._types = last._containers, last._types
        else:
            self._containers = [(path, container, _copy(container)) for path, container in _containers(model)]
            self._types = [type(container) for _, container, _ in self._containers]
        if _reusable:
            _reusable[0] = self
        # `array += x` and `array[:] = x` change the array that a name stands for; a second handle keeps the old one.
        self._arrays = [
            (container, key, array, handle(array))
            for _, container, old in self._containers
            for key, array in _items(old)
            if type(array) is mx.array
        ]

    def _is_current(self) -> bool:
        """Return whether every container still holds the same objects, so that a new walk would find the same."""
        types = map(type, (container for _, container, _ in self._containers))
        return all(map(operator.is_, self._types, types)) and not self.changes()

    def changes(self) -> list[Change]:
        """Return what was added, removed or bound to another value since the snapshot."""
        found: list[Change] = []
        for path, container, old in self._containers:
            values, now = _values(old), _values(container)
            if len(values) == len(now) and all(map(operator.is_, values, now)):
                continue
            found += _differences(path, container, old)
        return found

    def array_changes(self) -> list[Change]:
        """Return the changes that concern arrays.

        MLX keeps a module's arrays apart from its Python attributes, so `None` that became an array is two changes.
        """
        return of_arrays(self.changes())

    def restore(self, *, code: bool = True) -> None:
        """Undo all changes, those made inside an array too.

        Args:
            code: Also those of Python values in globals, classes and closures; a session leaves them alone, since
                others may write there. Arrays are always put back.
        """
        found = self.changes()
        arrays = {change.path for change in of_arrays(found)}
        self.undo(change for change in found if code or change.path in arrays or not change.of_code)
        self.rewind()

    def rewind(self) -> None:
        """Give every array its old content back, at no cost: the old content is shared, not copied."""
        for container, key, array, old in self._arrays:
            if array.shape == old.shape and array.dtype == old.dtype:
                # With an ellipsis MLX would squeeze and broadcast what begins with axes of 1: two nodes at each step.
                array[slice(None) if array.ndim else ...] = old
            else:
                container[key] = old

    @staticmethod
    def undo(changes: Iterable[Change]) -> None:
        """Put the old values of `changes` back."""
        listed = list(changes)
        for change in reversed(listed):
            if change.old is _ABSENT:
                _remove(change.container, change.key)
        for change in listed:
            if change.old is not _ABSENT:
                _assign(change.container, change.key, change.old)


_reusable: list[ModuleState | None] = []
"""The last snapshot, while snapshots are reused; empty otherwise."""


@contextmanager
def snapshots_reused() -> Iterator[None]:
    """Within it, a snapshot of a model that has not changed since the last one takes over what that one found.

    The walk through a model's code is most of a snapshot. The last snapshot, and with it its model, stays alive.
    """
    _reusable.append(None)
    try:
        yield
    finally:
        _reusable.clear()


def _containers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield each container that model code can write, with its path: those below the module, and of its code."""
    seen: set[Any] = set()
    stack: list[tuple[str, Any]] = [("", model)]
    while stack:
        path, value = stack.pop()
        place = (View, id(value.of)) if isinstance(value, View) else id(value)
        if place in seen:
            continue
        seen.add(place)
        prefix = f"{path}." if path else ""
        if isinstance(value, _HOLDERS):
            if not isinstance(value, tuple):
                yield path, value
            for key, item in enumerate(value) if isinstance(value, list | tuple) else value.items():
                if type(item) not in _LEAVES:
                    stack.append((f"{prefix}{key}", item))
            if isinstance(value, View):
                continue
        stack += inner(path, value)
        # A class has thousands of instances in a large model, and is looked at once.
        known = isinstance(value, nn.Module) or is_model_code(type(value).__module__)
        if known and type(value) not in seen and not isinstance(value, type):
            seen.add(type(value))
            stack += roots(type(value))
        attributes = getattr(value, "__dict__", None)
        if isinstance(attributes, dict) and _is_open(value):
            stack.append((path, attributes))


def of_arrays(changes: list[Change]) -> list[Change]:
    """Return the changes at places where an array came or went, both halves of each."""
    paths = {change.path for change in changes if change.concerns_arrays}
    return [change for change in changes if change.path in paths]


def _is_open(value: Any) -> bool:
    """Return whether to look into an object's attributes: modules of the model, and objects of model code's classes."""
    if isinstance(value, type | ModuleType):
        return False
    return isinstance(value, nn.Module | FunctionType | SimpleNamespace | dict | list) or is_model_code(
        type(value).__module__
    )


def _copy(container: Any) -> Any:
    return list(container) if isinstance(container, list) else dict(container.items())


def _items(container: Any) -> Iterable[tuple[Any, Any]]:
    return enumerate(container) if isinstance(container, list) else container.items()


def _values(container: Any) -> list[Any]:
    return container if isinstance(container, list) else list(container.values())


def _differences(path: str, container: Any, old: Any) -> Iterator[Change]:
    before = dict(_items(old))
    after = dict(_items(container))
    for key in [*before, *(key for key in after if key not in before)]:
        was, now = before.get(key, _ABSENT), after.get(key, _ABSENT)
        if was is not now and not _equal(was, now):
            yield Change(f"{path}.{key}" if path else str(key), container, key, was, now)


def _equal(old: Any, new: Any) -> bool:
    return type(old) is type(new) and type(old) in _PLAIN and (old == new or old != old)


def _has_array(value: Any, depth: int = 4) -> bool:
    if isinstance(value, mx.array):
        return True
    if depth == 0 or type(value) in _PLAIN:
        return False
    if isinstance(value, dict):
        return any(_has_array(item, depth - 1) for item in value.values())
    if isinstance(value, list | tuple):
        return any(_has_array(item, depth - 1) for item in value)
    return _has_array(getattr(value, "__dict__", None), depth - 1)


def _remove(container: Any, key: Any) -> None:
    """Take a key, or an element and those after it, away again."""
    if isinstance(container, list):
        del container[key:]
    else:
        container.pop(key, None)


def _assign(container: Any, key: Any, value: Any) -> None:
    """Put `value` back at `key`; elements cut off a list are put back first to last."""
    if isinstance(container, list) and key >= len(container):
        container.append(value)
    else:
        container[key] = value
