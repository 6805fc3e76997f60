"""The functions inside what a class or a Python module holds, and the files that these come from."""

from __future__ import annotations

import inspect
import sys
import sysconfig
from collections.abc import Iterator
from functools import cached_property, lru_cache, partial, partialmethod
from importlib.util import find_spec
from pathlib import Path
from types import CodeType, FunctionType, MethodType
from typing import Any, Literal

PACKAGES = ("mlx", "mlx_lm")
"""Packages whose files are compared with the code that runs."""

TRUSTED = ("numpy", "mlx_audit")
"""Packages that a model may call, whose files are not compared."""

_WRITTEN = frozenset(
    f"__{name}__"
    for name in ("init", "repr", "eq", "lt", "le", "gt", "ge", "hash", "setattr", "delattr", "new")
)
"""Methods that dataclasses and named tuples write themselves, from a text without a file."""


def parts(value: Any) -> Iterator[Any]:
    """Yield the functions in a value: behind descriptors and decorators, and those that they hold."""
    waiting, seen = [value], set()
    while waiting:
        part = waiting.pop()
        if id(part) in seen:
            continue
        seen.add(id(part))
        if isinstance(part, staticmethod | classmethod | MethodType):
            waiting.append(part.__func__)
        elif isinstance(part, property):
            waiting += [each for each in (part.fget, part.fset, part.fdel) if each is not None]
        elif isinstance(part, cached_property):
            waiting.append(part.func)
        elif isinstance(part, partial | partialmethod):
            waiting += [part.func, *filter(callable, part.args), *filter(callable, part.keywords.values())]
        else:
            yield part
            waiting += _held(part)


def _held(part: Any) -> Iterator[Any]:
    """Yield the functions of a closure, and what stands behind a wrapper that is no function, as `lru_cache`'s."""
    if isinstance(part, FunctionType):
        for cell in part.__closure__ or ():
            try:
                content = cell.cell_contents
            except ValueError:  # an empty cell
                continue
            if isinstance(content, FunctionType | MethodType | partial):
                yield content
    elif not isinstance(part, type) and (wrapped := getattr(part, "__wrapped__", None)) is not None:
        yield wrapped


def code_of(part: Any) -> CodeType | None:
    """Return the code of a function, also of one that `mx.compile` made."""
    code = getattr(part, "__code__", None)
    return code if isinstance(code, CodeType) else None


def is_written(cls: type, name: str, value: Any) -> bool:
    """Return whether a method of a dataclass or a named tuple is one that Python wrote."""
    code = code_of(inspect.unwrap(value)) if callable(value) else None
    made = hasattr(cls, "__dataclass_fields__") or hasattr(cls, "_fields")
    return made and name in _WRITTEN and code is not None and code.co_filename == "<string>"


def home_of(value: Any) -> str:
    """Return the name of the Python module of a value, or of its class."""
    return str(getattr(value, "__module__", None) or type(value).__module__)


def name_of(value: Any) -> str:
    """Return the full name of a value, or of its class."""
    return f"{home_of(value)}.{getattr(value, '__qualname__', type(value).__name__)}"


@lru_cache(maxsize=4096)
def package_of(filename: str) -> Literal["compared", "trusted", ""]:
    """Return how a file is taken: its code is compared, or it is trusted as it is; empty for any other file."""
    if filename.startswith("<frozen "):
        return "trusted"
    file = Path(filename)
    if any(file.is_relative_to(folder) for folder in _folders(PACKAGES)):
        return "compared" if file.suffix == ".py" else "trusted"
    if any(file.is_relative_to(folder) for folder in _folders(TRUSTED)):
        return "trusted"
    paths = sysconfig.get_paths()
    standard = any(file.is_relative_to(paths[name]) for name in ("stdlib", "platstdlib"))
    return "trusted" if standard and not {"site-packages", "dist-packages"} & {*file.parts} else ""


@lru_cache(maxsize=8)
def _folders(packages: tuple[str, ...]) -> tuple[Path, ...]:
    folders: list[Path] = []
    for name in packages:
        spec = sys.modules[name].__spec__ if name in sys.modules else find_spec(name)
        folders += [Path(location) for location in (spec.submodule_search_locations or [] if spec else [])]
    return tuple(folders)
