"""Where model code can keep something besides its modules: globals, class attributes, closures, default arguments."""

from __future__ import annotations

import sys
from collections import UserDict, UserList, deque
from collections.abc import Iterable, Iterator
from copy import copy
from functools import cache, partial
from threading import local
from types import FunctionType, MethodType
from typing import Any
from weakref import WeakKeyDictionary, WeakValueDictionary

import numpy as np

_OTHERS = ("mlx", "mlx_audit", "builtins", "abc", "typing", "dataclasses", "enum")
"""First parts of module names that are not model code."""


_PYTHONS_OWN = frozenset(
    (
        "__name__",
        "__doc__",
        "__package__",
        "__loader__",
        "__spec__",
        "__file__",
        "__cached__",
        "__builtins__",
        "__annotations__",
        "__dict__",
        "__weakref__",
        "__module__",
        "__warningregistry__",
    )
)
"""Names that Python itself keeps in a module or class."""
_SIMPLE = frozenset((bool, int, float, complex, str, bytes, type(None)))
_ABSENT = object()


class View:
    """Something that holds values by name, as a mapping that can be written.

    Attributes:
        of: What it shows; two views of the same thing are the same place.
    """

    of: Any

    def items(self) -> list[tuple[str, Any]]:
        """Return names and values as they are now."""
        raise NotImplementedError

    def values(self) -> list[Any]:
        """Return the values, in the order of `items`."""
        return [value for _, value in self.items()]

    def __setitem__(self, name: str, value: Any) -> None:
        raise NotImplementedError

    def pop(self, name: str, default: Any = None) -> None:
        """Take a name away; one that is not there is no error."""
        raise NotImplementedError


class Globals(View):
    """The global names of a Python module, but for those that Python itself keeps there."""

    def __init__(self, names: dict[str, Any]) -> None:
        self.of = self._names = names

    def items(self) -> list[tuple[str, Any]]:
        return [(name, value) for name, value in self._names.items() if name not in _PYTHONS_OWN]

    def __setitem__(self, name: str, value: Any) -> None:
        self._names[name] = value

    def pop(self, name: str, default: Any = None) -> None:
        self._names.pop(name, default)


class Attributes(View):
    """The attributes of a class itself, or what an object keeps in slots."""

    def __init__(self, of: Any, names: Iterable[str]) -> None:
        self.of = of
        self._named = names

    def items(self) -> list[tuple[str, Any]]:
        names = list(vars(self.of)) if isinstance(self.of, type) else self._named
        found = (
            vars(self.of) if isinstance(self.of, type) else {n: getattr(self.of, n, _ABSENT) for n in names}
        )
        return [(n, found[n]) for n in names if found[n] is not _ABSENT and n not in _PYTHONS_OWN]

    def __setitem__(self, name: str, value: Any) -> None:
        setattr(self.of, name, value)

    def pop(self, name: str, default: Any = None) -> None:
        if hasattr(self.of, name):
            delattr(self.of, name)


class Content(View):
    """What a container without names holds: a deque, a set, bytes that can be written, a NumPy array."""

    def __init__(self, of: Any) -> None:
        self.of = of
        self._copy = copy(of)

    def items(self) -> list[tuple[str, Any]]:
        if isinstance(self.of, bytearray):
            return [("content", bytes(self.of))]
        if isinstance(self.of, np.ndarray):
            return [("content", self.of.tobytes())]
        return [("content", str([item if type(item) in _SIMPLE else id(item) for item in self.of]))]

    def __setitem__(self, name: str, value: Any) -> None:
        if isinstance(self.of, bytearray | np.ndarray):
            self.of[:] = self._copy
        else:
            self.of.clear()
            (self.of.update if isinstance(self.of, set) else self.of.extend)(self._copy)

    def pop(self, name: str, default: Any = None) -> None:
        """A content is never absent."""


_WRAPPED: tuple[Any, ...] = (UserDict, UserList, WeakKeyDictionary, WeakValueDictionary)
"""Containers of Python's own that are written in Python, around a plain one."""

CONTENTS = (deque, set, bytearray, np.ndarray)
"""Containers that `Content` looks into."""


class Cells(View):
    """The variables that a function shares with the function that it was defined in."""

    def __init__(self, function: FunctionType) -> None:
        self.of = function
        self._cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))

    def items(self) -> list[tuple[str, Any]]:
        found = []
        for name, cell in self._cells.items():
            try:
                found.append((name, cell.cell_contents))
            except ValueError:  # not assigned yet
                continue
        return found

    def __setitem__(self, name: str, value: Any) -> None:
        self._cells[name].cell_contents = value

    def pop(self, name: str, default: Any = None) -> None:
        del self._cells[name].cell_contents


def roots(cls: type) -> Iterator[tuple[str, Any]]:
    """Yield, with a name, what the code of a class can write besides its instances."""
    for base in (*cls.__mro__, *type.mro(type(cls))):
        if not _is_foreign(base.__module__):
            continue
        yield f"class {base.__qualname__}", Attributes(base, ())
        for name, method in vars(base).items():
            if isinstance(method, FunctionType):
                yield from parts(f"class {base.__qualname__}.{name}", method)
        module = sys.modules.get(base.__module__)
        if module is not None:
            yield f"globals of {base.__module__.rsplit('.', 1)[-1]}", Globals(vars(module))


def inner(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield what an object keeps where its attributes don't show it."""
    if isinstance(value, CONTENTS):
        yield path, Content(value)
    elif isinstance(value, _WRAPPED):
        yield path, value.data
    elif isinstance(value, local):
        yield path, vars(value)
    elif isinstance(value, FunctionType):
        yield from parts(path, value)
    elif isinstance(value, MethodType):
        yield path, value.__self__
    elif isinstance(value, partial):
        yield path, (value.func, value.args, value.keywords)
    elif isinstance(value, type):
        if is_model_code(value.__module__):
            yield from roots(value)
    elif is_model_code(type(value).__module__):
        slots = [name for base in type(value).__mro__ for name in _slots_of(base)]
        if slots:
            yield path, Attributes(value, slots)


def _slots_of(cls: type) -> tuple[str, ...]:
    slots = vars(cls).get("__slots__", ())
    return (slots,) if isinstance(slots, str) else tuple(slots)


def parts(path: str, function: FunctionType) -> Iterator[tuple[str, Any]]:
    """Yield what a function of model code can keep between calls."""
    if not is_model_code(function.__module__ or ""):
        return
    if function.__closure__:
        yield f"{path} closure", Cells(function)
    if function.__defaults__:
        yield f"{path} defaults", function.__defaults__
    if function.__kwdefaults__:
        yield f"{path} defaults", function.__kwdefaults__


@cache
def is_model_code(module: str) -> bool:
    """Return whether a module is model code: mlx-lm's, or a user's own file, but no other installed package."""
    if not _is_foreign(module):
        return False
    if module.split(".")[0] == "mlx_lm":
        return True
    file = getattr(sys.modules.get(module), "__file__", None) or ""
    return "site-packages" not in file and "dist-packages" not in file


def _is_foreign(module: str) -> bool:
    """Return whether a module is neither MLX's, Python's nor mlx-audit's."""
    first = module.split(".")[0]
    return first not in _OTHERS and first not in sys.stdlib_module_names
