"""Is the code that a live model runs the code that was audited? Records speak of source files, not of objects."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import TYPE_CHECKING, Any

from mlx_audit.evidence.callables import PACKAGES, code_of, home_of, is_written, name_of, package_of, parts
from mlx_audit.evidence.compiled_files import CompiledFile, compiled_file, literals
from mlx_audit.evidence.own_imports import foreign_imports

if TYPE_CHECKING:
    import mlx.nn as nn

_PROVIDES = "new_fixed_capacity_cache"
"""A model that has this method makes its caches itself."""

_PLAIN = (bool, int, float, complex, str, bytes, tuple)
"""Types of class attributes that stay as they are written."""

_ANNOTATIONS = frozenset({"__annotate__", "__annotate_func__"})
"""Functions that Python itself adds."""


def own_file(model: Any) -> Path | None:
    """Return the file of a model that is none of mlx-lm's, as Python imported it."""
    file = getattr(sys.modules.get(type(model).__module__), "__file__", None)
    return None if file is None or package_of(file) == "compared" else Path(file).resolve()


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
                found[f"{where}.{name} is {name_of(value)}"] = None
        if module.training and "Dropout" in cls.__name__ and getattr(module, "_p_1", 1.0) != 1.0:
            found[f"{where} drops values at random; call model.eval()"] = None
    if own is not None:
        found |= {f"no digest covers `{name}`": None for name in foreign_imports(own)}
    return [*found, *look.foreign()]


def _modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield all modules with their paths, as `named_modules` does, in a fraction of its time."""
    import mlx.nn as nn  # not above: pytest's collection and `list` import this module, and need no MLX

    waiting: list[tuple[str, Any]] = [("", model)]
    while waiting:
        path, value = waiting.pop()
        if isinstance(value, nn.Module):
            yield path, value
        before = f"{path}." if path else ""
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            if isinstance(item, dict | list | tuple):
                waiting.append((f"{before}{key}", item))


class _Clean:
    """Where one look found nothing foreign: as long as all of it is the same, there is nothing new to find."""

    def __init__(self, look: _Look) -> None:
        self._names = [(space, [id(value) for value in space.values()]) for space in look.spaces]
        # Held, so that no other object gets the place in memory, and so the id, of one of these.
        self._held = [value for space in look.spaces for value in space.values() if callable(value)]
        self._codes = [(function, function.__code__) for function in look.functions]
        self._files = {name: file for name, file in look.files.items() if isinstance(file, CompiledFile)}

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


class _Look:
    """One look at the code behind a model: classes and Python modules are each looked at once."""

    def __init__(self, own: Path | None) -> None:
        self._own = own
        self._classes: dict[type, bool] = {}
        self._globals: dict[int, dict[str, Any]] = {}
        self.files: dict[str, CompiledFile | bool] = {}
        self.spaces: list[Mapping[str, Any]] = []
        self.functions: list[Any] = []

    def knows_class(self, cls: type) -> bool:
        """Return whether a class and its bases come from audited files; their methods are looked at later."""
        if (known := self._classes.get(cls)) is None:
            self._classes |= {base: self._is_home(base) for base in cls.__mro__ if base not in self._classes}
            known = self._classes[cls] = all(self._classes[base] for base in cls.__mro__)
        return known

    def knows(self, value: Any) -> bool:
        """Return whether a callable comes from an audited file."""
        return next(self._strange(value), None) is None

    def foreign(self) -> list[str]:
        """Return what is foreign in the classes seen so far, in their modules, and in those that these use."""
        key = (self._own, frozenset(self._classes), frozenset(self._globals))
        if (clean := _CLEAN.get(key)) is not None and clean.holds():
            return []
        found = list(self._search())
        if not found:
            if len(_CLEAN) >= _MOST_CLEAN:
                _CLEAN.clear()
            _CLEAN[key] = _Clean(self)
        return found

    def _search(self) -> Iterator[str]:
        classes, spaces = 0, 0
        while classes < len(self._classes) or spaces < len(self._globals):
            for cls in [*self._classes][classes:]:
                classes += 1
                if self._classes[cls]:  # else the class itself is named
                    yield from self._foreign_in_class(cls)
            for space in [*self._globals.values()][spaces:]:
                spaces += 1
                yield from self._foreign_in_module(space)

    def _visit(self, space: dict[str, Any] | None) -> None:
        """Look at the globals of a module later: at these, for the module of this name may be a newer import."""
        if space is not None and id(space) not in self._globals:
            mlx = str(space.get("__name__")).split(".")[0] in PACKAGES
            if mlx or self._is_own(_file_of(space)):
                self._globals[id(space)] = space

    def _foreign_in_module(self, space: dict[str, Any]) -> Iterator[str]:
        import mlx.nn as nn

        home, file = space["__name__"], self._file(_file_of(space))
        self.spaces.append(space)
        for name, value in [*space.items()]:
            if isinstance(value, ModuleType):
                self._visit(vars(value))
            elif isinstance(value, type):
                if value.__module__ == home:
                    self._classes.setdefault(value, True)
                elif not self._is_home(value):
                    yield f"{home}.{name} is {name_of(value)}"
            elif not callable(value) or isinstance(value, nn.Module) or name in _ANNOTATIONS:
                continue
            elif why := next(self._strange(value, file, name), None):
                yield f"{home}.{name} {why}"
        if self._own is not None and self._is_own(_file_of(space)):
            yield from _changed_values(space, self._own)

    def _foreign_in_class(self, cls: type) -> Iterator[str]:
        file = self._file(_file_of(vars(sys.modules.get(cls.__module__, object))))
        if file is True or cls.__module__.split(".")[0] in sys.stdlib_module_names:
            return
        self.spaces.append(vars(cls))
        for name, value in [*vars(cls).items()]:
            if isinstance(value, type) or not (callable(value) or hasattr(value, "__get__")):
                continue
            if name in _ANNOTATIONS or is_written(cls, name, value):
                continue
            where = f"{cls.__module__}.{cls.__qualname__}.{name}"
            if why := next(self._strange(value, file, f"{cls.__qualname__}.{name}"), None):
                yield f"{where} {why}"
            elif name == _PROVIDES and not isinstance(value, FunctionType):
                yield f"{where} is no plain method"

    def _strange(self, value: Any, file: CompiledFile | bool = True, name: str = "") -> Iterator[str]:
        """Yield why a value that is called `name` in a file is not what the file says."""
        compared = []
        for part in parts(value):
            if (code := code_of(part)) is None:
                if not self._is_home(part):
                    yield f"is {name_of(part)}"
                continue
            if name:  # else a value of one model, that is not to be held
                self.functions.append(part)
            self._visit(getattr(part, "__globals__", None))
            held, source = self._file(code.co_filename), Path(code.co_filename).name
            if held is False:
                yield f"comes from {source}"
            elif isinstance(held, CompiledFile):
                compared.append(code)
                if not held.has(code):
                    yield f"was changed since it was imported from {source}: start the program again"
        if isinstance(file, CompiledFile) and compared and not _belongs(compared, file, name):
            yield f"is {compared[0].co_qualname} of {Path(compared[0].co_filename).name}"

    def _file(self, filename: str) -> CompiledFile | bool:
        """Return the compiled file, or whether it is to be trusted as it is."""
        if (found := self.files.get(filename)) is None:
            package = package_of(filename)
            compared = package == "compared" or (not package and self._is_own(filename))
            found = self.files[filename] = compiled_file(filename) if compared else bool(package)
        return found

    def _is_own(self, filename: str) -> bool:
        return self._own is not None and Path(filename).resolve() == self._own

    def _is_home(self, value: Any) -> bool:
        """Return whether a class, or a value that has no code of its own, comes from where models' code does."""
        home = home_of(value)
        first = home.split(".")[0]
        if first in sys.stdlib_module_names:
            return first != "unittest"  # mocks stand in for code
        file = getattr(sys.modules.get(home), "__file__", None)
        return self._file(file) is not False if file is not None else first in (*PACKAGES, "nanobind")


def _file_of(space: Mapping[str, Any]) -> str:
    return str(space.get("__file__") or "")


def _belongs(codes: list[CodeType], file: CompiledFile, name: str) -> bool:
    """Return whether one of a value's codes is the one of this name in a file, or one that the file takes in."""
    last = name.rpartition(".")[2]
    if file.defines(name):
        # The file itself may give the name to another: `Model.make_cache = ring_caches`.
        return any(
            file.has(code) and (code.co_qualname == name or {code.co_name, last} <= file.names)
            for code in codes
        )
    return any(
        "<" in code.co_qualname or code.co_name in file.names or code.co_name == last for code in codes
    )


def _changed_values(space: Mapping[str, Any], file: Path) -> Iterator[str]:
    """Yield the constants and defaults of a module that its file gives other values to."""
    for name, text in literals(file).items():
        *classes, last = name.removesuffix("()").split(".")
        names = space
        for each in classes:
            names = getattr(names.get(each), "__dict__", {})
        value = names.get(last)
        if classes and not name.endswith("()") and type(value) not in _PLAIN:
            continue  # such as a member of an enumeration, or a field of a named tuple
        if (_defaults(value, last) if name.endswith("()") else repr(value)) not in (text, None):
            yield f"{space['__name__']}.{name} is not {text}, as its file says: start the program again"


def _defaults(value: Any, name: str) -> str | None:
    """Return the defaults of a function of this name as text, also behind decorators; None where there is none."""
    for part in parts(value):
        if (code := code_of(part)) is not None and code.co_name == name:
            return " ".join(map(repr, (*(part.__defaults__ or ()), *(part.__kwdefaults__ or {}).values())))
    return None
