"""Where model code can keep something besides its modules: globals, class attributes, closures, default arguments."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import FunctionType
from typing import Any

_OTHERS = ("mlx", "mlx_audit", "builtins", "abc", "typing", "dataclasses", "enum")
"""First parts of module names that are not model code."""


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
    """The global names of a Python module."""

    def __init__(self, names: dict[str, Any]) -> None:
        self.of = self._names = names

    def items(self) -> list[tuple[str, Any]]:
        return [(name, value) for name, value in self._names.items() if not name.startswith("__")]

    def __setitem__(self, name: str, value: Any) -> None:
        self._names[name] = value

    def pop(self, name: str, default: Any = None) -> None:
        self._names.pop(name, default)


class ClassAttributes(View):
    """The attributes of a class itself, not of its instances."""

    def __init__(self, cls: type) -> None:
        self.of = self._class = cls

    def items(self) -> list[tuple[str, Any]]:
        return [(name, value) for name, value in vars(self._class).items() if not name.startswith("__")]

    def __setitem__(self, name: str, value: Any) -> None:
        setattr(self._class, name, value)

    def pop(self, name: str, default: Any = None) -> None:
        if name in vars(self._class):
            delattr(self._class, name)


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
    """Yield, with a name, what the code of a module's class can write besides the module itself."""
    for base in cls.__mro__:
        if not is_model_code(base.__module__):
            continue
        yield f"class {base.__qualname__}", ClassAttributes(base)
        for name, method in vars(base).items():
            if isinstance(method, FunctionType):
                yield from parts(f"class {base.__qualname__}.{name}", method)
        module = sys.modules.get(base.__module__)
        if module is not None:
            yield f"globals of {base.__module__.rsplit('.', 1)[-1]}", Globals(vars(module))


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


def is_model_code(module: str) -> bool:
    """Return whether a module's name is that of a model, and not of MLX, Python or mlx-audit."""
    first = module.split(".")[0]
    return first not in _OTHERS and first not in sys.stdlib_module_names
