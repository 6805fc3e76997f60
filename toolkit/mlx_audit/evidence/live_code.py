"""Is the code that a live model runs the code that was audited? Records speak of source files, not of objects."""

from __future__ import annotations

import inspect
import sys
import sysconfig
from collections.abc import Iterator
from functools import cached_property, lru_cache, partial
from importlib.util import find_spec
from pathlib import Path
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import mlx.nn as nn

from mlx_audit.evidence.compiled_files import CompiledFile, compiled_file, literals
from mlx_audit.evidence.own_imports import foreign_imports

_PACKAGES = ("mlx", "mlx_lm")
_TRUSTED = ("numpy", "mlx_audit")
"""Packages that a model may call, whose files are not compared."""
_PROVIDES = "new_fixed_capacity_cache"
"""A model that has this method makes its caches itself."""
_MADE = frozenset("__init__ __repr__ __eq__ __lt__ __le__ __gt__ __ge__ __hash__ __setattr__ __delattr__".split())
"""Methods that dataclasses write themselves."""


def own_file(model: Any) -> Path | None:
    """Return the file of a model that is none of mlx-lm's, as Python imported it."""
    file = getattr(sys.modules.get(type(model).__module__), "__file__", None)
    return None if file is None or _package(file) == "mlx" else Path(file).resolve()


def foreign_code(model: Any, own: Path | None = None) -> list[str]:
    """Return why a model may behave otherwise than its source says; empty where all its code is MLX's and mlx-lm's.

    Looks at the class of every module, at all functions of these classes and of the Python modules that define or use
    them, at what an own file imports, and at dropout that is switched on. A function must be what its file compiles
    to now. Weights, quantization and low-rank adapters of mlx-lm's own classes are fine.

    Args:
        model: A live model.
        own: The file of the model itself, where that is none of mlx-lm's and was audited.
    """
    look = _Look(own)
    found: dict[str, None] = {}
    for path, module in _modules(model):
        cls = type(module)
        where = path or "the model"
        if not look.knows_class(cls):
            found[f"{where} is a {cls.__module__}.{cls.__qualname__}"] = None
        for name, value in vars(module).items():
            if callable(value) and not look.knows(value):
                found[f"{where}.{name} is {_text(value)}"] = None
        if module.training and "Dropout" in cls.__name__ and getattr(module, "_p_1", 1.0) != 1.0:
            found[f"{where} drops values at random; call model.eval()"] = None
    if own is not None:
        found |= {f"no digest covers `{name}`": None for name in foreign_imports(own)}
    return [*found, *look.foreign()]


class _Clean:
    """Where one look found nothing foreign: as long as all of it is the same, there is nothing new to find."""

    def __init__(self, look: _Look) -> None:
        self._names = [(space, [id(value) for value in space.values()]) for space in look.spaces]
        self._held = [value for space in look.spaces for value in space.values() if callable(value)]
        self._codes = [(function, function.__code__) for function in look.functions]
        self._files = look.compared

    def holds(self) -> bool:
        """Return whether the same names have the same values, the functions the same code, the files the same text."""
        return (
            all(ids == [id(value) for value in space.values()] for space, ids in self._names)
            and all(function.__code__ is code for function, code in self._codes)
            and all(compiled_file(name) is file for name, file in self._files.items())
        )


_CLEAN: dict[Any, _Clean] = {}
_MOST_CLEAN = 64
"""Sets of classes that are remembered; a process serves few models."""


def _modules(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield all modules with their paths, as `named_modules` does, in a fraction of its time."""
    waiting: list[tuple[str, Any]] = [("", module)]
    while waiting:
        path, value = waiting.pop()
        if isinstance(value, nn.Module):
            yield path, value
        items = value.items() if isinstance(value, dict) else enumerate(value)
        before = f"{path}." if path else ""
        waiting += [
            (f"{before}{key}", item) for key, item in items if isinstance(item, dict | list | tuple)
        ]


class _Look:
    """One look at the code behind a model: classes and Python modules are each looked at once."""

    def __init__(self, own: Path | None) -> None:
        self._own = own
        self._files: dict[str, CompiledFile | bool] = {}
        self._classes: dict[type, bool] = {}
        self._modules: dict[str, None] = {}
        self.spaces: list[Any] = []
        self.functions: list[Any] = []

    @property
    def compared(self) -> dict[str, CompiledFile]:
        """The files that were compared."""
        return {name: file for name, file in self._files.items() if isinstance(file, CompiledFile)}

    def knows_class(self, cls: type) -> bool:
        """Return whether a class comes from an audited file; its methods are looked at later."""
        if (known := self._classes.get(cls)) is None:
            known = self._classes[cls] = all(self._is_home(base) for base in cls.__mro__)
            for base in cls.__mro__:
                self._classes.setdefault(base, True)
                self._visit(base.__module__)
        return known

    def knows(self, value: Any) -> bool:
        """Return whether a callable comes from an audited file."""
        return next(self._strange(value), None) is None

    def foreign(self) -> list[str]:
        """Return what is foreign in the classes seen so far, in their modules, and in those that these use."""
        key = (self._own, frozenset(self._classes))
        if (clean := _CLEAN.get(key)) is not None and clean.holds():
            return []
        found = list(self._search())
        if not found:
            if len(_CLEAN) >= _MOST_CLEAN:
                _CLEAN.clear()
            _CLEAN[key] = _Clean(self)
        return found

    def _search(self) -> Iterator[str]:
        waiting = 0
        while waiting < len(self._modules):
            name = [*self._modules][waiting]
            waiting += 1
            yield from self._foreign_in_module(sys.modules[name])
        for cls, known in [*self._classes.items()]:
            if known:
                yield from self._foreign_in_class(cls)

    def _visit(self, name: str) -> None:
        module = sys.modules.get(name)
        if name not in self._modules and module is not None and self._is_compared(module):
            self._modules[name] = None

    def _is_compared(self, module: ModuleType) -> bool:
        file = getattr(module, "__file__", None)
        return file is not None and (_package(file) == "mlx" or self._is_own(file))

    def _foreign_in_module(self, module: ModuleType) -> Iterator[str]:
        home = module.__name__
        file = self._file(module.__file__ or "")
        self.spaces.append(vars(module))
        for name, value in [*vars(module).items()]:
            if isinstance(value, ModuleType):
                self._visit(value.__name__)
            elif isinstance(value, type):
                if value.__module__ == home and value not in self._classes:
                    self._classes[value] = True
                elif not self._is_home(value):
                    yield f"{home}.{name} is {_text(value)}"
            elif callable(value) and not isinstance(value, nn.Module):
                self._visit(str(getattr(value, "__module__", None)))
                if why := next(self._strange(value, file, name), None):
                    yield f"{home}.{name} {why}"
        if self._own is not None and self._is_own(module.__file__ or ""):
            for name, literal in literals(self._own).items():
                if repr(vars(module).get(name)) != repr(literal):
                    yield f"{home}.{name} is not {literal!r}, as its file says: start the program again"

    def _foreign_in_class(self, cls: type) -> Iterator[str]:
        module = sys.modules.get(cls.__module__)
        if module is None or not self._is_compared(module):
            return
        file = self._file(module.__file__ or "")
        self.spaces.append(vars(cls))
        for name, value in [*vars(cls).items()]:
            if isinstance(value, type) or not (callable(value) or hasattr(value, "__get__")):
                continue
            if name in _MADE and hasattr(cls, "__dataclass_fields__") and _is_made(value):
                continue
            if why := next(self._strange(value, file, f"{cls.__qualname__}.{name}"), None):
                yield f"{cls.__module__}.{cls.__qualname__}.{name} {why}"
            elif name == _PROVIDES and not isinstance(value, FunctionType):
                yield f"{cls.__module__}.{cls.__qualname__}.{name} is no plain method"

    def _strange(self, value: Any, file: CompiledFile | bool = True, name: str = "") -> Iterator[str]:
        """Yield why a value that is called `name` in a file is not what the file says."""
        codes = []
        for part in _parts(value):
            code = getattr(part, "__code__", None)
            if isinstance(code, CodeType):
                codes.append(code)
                self.functions.append(part)
                held = self._file(code.co_filename)
                if held is False:
                    yield f"comes from {Path(code.co_filename).name}"
                elif isinstance(held, CompiledFile) and not held.has(code):
                    yield f"was changed since it was imported from {Path(code.co_filename).name}: start the program again"
            elif not self._is_home(part):
                yield f"is {_text(part)}"
        if isinstance(file, CompiledFile) and codes and not _belongs(codes, file, name):
            yield f"is {codes[0].co_qualname} of {Path(codes[0].co_filename).name}"

    def _file(self, filename: str) -> CompiledFile | bool:
        """Return the compiled file, or whether it is to be trusted as it is."""
        if (found := self._files.get(filename)) is None:
            package = _package(filename)
            if not filename.endswith(".py"):  # an extension, or what is built into Python
                found = bool(package)
            elif package == "mlx" or (not package and self._is_own(filename)):
                found = compiled_file(filename)
            else:
                found = bool(package)
            self._files[filename] = found
        return found

    def _is_own(self, filename: str) -> bool:
        return self._own is not None and Path(filename).resolve() == self._own

    def _is_home(self, value: Any) -> bool:
        """Return whether a class, or a value that has no code of its own, comes from where models' code does."""
        home = _home(value)
        first = home.split(".")[0]
        if first in sys.stdlib_module_names:
            return first != "unittest"  # mocks stand in for code
        file = getattr(sys.modules.get(home), "__file__", None)
        if file is None or first == "nanobind":
            return first in (*_PACKAGES, "nanobind")
        return self._file(file) is not False


def _belongs(codes: list[CodeType], file: CompiledFile, name: str) -> bool:
    """Return whether one of a value's codes is the one of this name in a file, or one that the file takes in."""
    if file.defines(name):
        return any(code.co_qualname == name and file.has(code) for code in codes)
    return any(
        "<" in code.co_qualname or code.co_name in file.names or code.co_name == name.rpartition(".")[2]
        for code in codes
    )


def _parts(value: Any) -> Iterator[Any]:
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
        elif isinstance(part, partial):
            waiting += [part.func, *filter(callable, part.args), *filter(callable, part.keywords.values())]
        elif isinstance(part, FunctionType):
            yield part
            waiting += [cell for cell in _cells(part) if isinstance(cell, FunctionType | partial | MethodType)]
        else:
            yield part
            if (wrapped := getattr(part, "__wrapped__", None)) is not None and not isinstance(part, type):
                waiting.append(wrapped)


def _cells(function: FunctionType) -> Iterator[Any]:
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # an empty cell
            continue


def _is_made(value: Any) -> bool:
    code = getattr(inspect.unwrap(value) if callable(value) else value, "__code__", None)
    return value is None or (isinstance(code, CodeType) and code.co_filename == "<string>")


def _home(value: Any) -> str:
    return str(getattr(value, "__module__", None) or type(value).__module__)


def _text(value: Any) -> str:
    return f"{_home(value)}.{getattr(value, '__qualname__', type(value).__name__)}"


@lru_cache(maxsize=4096)
def _package(filename: str) -> str:
    """Return "mlx" for a file whose code is compared, "trusted" for one that is taken as it is, else ""."""
    if filename.startswith("<frozen "):
        return "trusted"
    file = Path(filename)
    if any(file.is_relative_to(folder) for folder in _folders(_PACKAGES)):
        return "mlx"
    if any(file.is_relative_to(folder) for folder in _folders(_TRUSTED)):
        return "trusted"
    paths = sysconfig.get_paths()
    installed = any(file.is_relative_to(paths[name]) for name in ("purelib", "platlib"))
    standard = any(file.is_relative_to(paths[name]) for name in ("stdlib", "platstdlib"))
    return "trusted" if standard and not installed and "site-packages" not in file.parts else ""


@lru_cache(maxsize=8)
def _folders(packages: tuple[str, ...]) -> tuple[Path, ...]:
    folders: list[Path] = []
    for name in packages:
        spec = sys.modules[name].__spec__ if name in sys.modules else find_spec(name)
        folders += [Path(location) for location in (spec.submodule_search_locations or [] if spec else [])]
    return tuple(folders)
