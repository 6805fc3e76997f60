"""Source files: found, bounded, parsed once. Nothing is imported."""

from __future__ import annotations

import ast
import importlib.util
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

MODELS = "mlx_lm.models"
CACHES = f"{MODELS}.cache"
"""Not read: mlx-lm's own caches, which fixed-capacity caches stand in for."""

LARGEST = 2 * 1024 * 1024


class Unreadable(Exception):
    """A file cannot be read; says why."""


@dataclass(frozen=True, eq=False)
class SourceModule:
    """A parsed file: what each name is bound to at its top level, in order."""

    name: str
    file: Path
    bindings: dict[str, list[ast.stmt]]


class Library:
    """The modules that may be read: the file itself and `mlx_lm.models`, some of them replaced."""

    def __init__(self, overlay: Mapping[str, Path]) -> None:
        self.overlay = dict(overlay)
        self.folder = models_folder()
        self.problems: list[str] = []
        self._modules: dict[str, SourceModule | None] = {}

    def main(self, file: Path) -> SourceModule:
        """Return the module of the audited file.

        Raises:
            Unreadable: with the reason.
        """
        name = f"{MODELS}.{file.stem}"
        module = _module(name, file)
        if self.folder and file.resolve() == (self.folder / f"{file.stem}.py").resolve():
            self._modules[name] = module
        return module

    def find(self, name: str) -> SourceModule | None:
        """Return a module of `mlx_lm.models`, None where it is not to be read."""
        if name not in self._modules:
            self._modules[name] = None
            file = self._file(name)
            try:
                self._modules[name] = _module(name, file) if file else None
            except Unreadable as problem:
                self.problems.append(str(problem))
        return self._modules[name]

    def _file(self, name: str) -> Path | None:
        if name == CACHES or not name.startswith(f"{MODELS}."):
            return None
        if name in self.overlay:
            return self.overlay[name]
        if self.folder is None:
            return None
        file = self.folder.joinpath(*name.removeprefix(f"{MODELS}.").split(".")).with_suffix(".py")
        inside = file.is_file() and file.resolve().is_relative_to(self.folder.resolve())
        return file if inside else None


def models_folder() -> Path | None:
    """Return the installed folder `mlx_lm/models`, found without importing mlx-lm."""
    spec = importlib.util.find_spec("mlx_lm")
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(spec.submodule_search_locations[0]) / "models"


def _module(name: str, file: Path) -> SourceModule:
    return SourceModule(name, file, bindings(_tree(file)))


@lru_cache(maxsize=4096)
def bindings(node: ast.Module | ast.ClassDef) -> dict[str, list[ast.stmt]]:
    """Return what each name is bound to at the top level of a module or class, in order."""
    found: dict[str, list[ast.stmt]] = {}
    for name, statement in _bound(node.body):
        found.setdefault(name, []).append(statement)
    return found


def _tree(file: Path) -> ast.Module:
    try:
        found = file.stat()
    except OSError as error:
        raise Unreadable(f"{file}: {error.strerror}") from error
    if not file.is_file():
        raise Unreadable(f"{file}: not a plain file")
    if found.st_size > LARGEST:
        raise Unreadable(f"{file}: {found.st_size} bytes; at most {LARGEST} are read")
    return _parsed(file, found.st_size, found.st_mtime_ns)


@lru_cache(maxsize=512)
def _parsed(file: Path, size: int, modified: int) -> ast.Module:
    """Parse one version of a file."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(file.read_bytes(), filename=file.name)
    except SyntaxError as error:
        raise Unreadable(f"{file}:{error.lineno or 1}: {error.msg}") from error
    except (ValueError, OSError) as error:
        raise Unreadable(f"{file}:1: {error}") from error
    except (RecursionError, MemoryError) as error:
        raise Unreadable(f"{file}:1: nested too deeply to be parsed") from error
    return tree


def _bound(body: list[ast.stmt]) -> Iterator[tuple[str, ast.stmt]]:
    """Yield each name that a block binds, with the statement that does."""
    for statement in body:
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield statement.name, statement
        elif isinstance(statement, ast.Import):
            for alias in statement.names:
                yield alias.asname or alias.name.split(".")[0], statement
        elif isinstance(statement, ast.ImportFrom):
            for alias in statement.names:
                yield alias.asname or alias.name, statement
        elif isinstance(statement, ast.Assign | ast.AnnAssign):
            targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
            for target in targets:
                yield from ((node.id, statement) for node in ast.walk(target) if isinstance(node, ast.Name))
        else:
            for part in ("body", "orelse", "finalbody"):
                yield from _bound(getattr(statement, part, []))
            for handler in getattr(statement, "handlers", []):
                yield from _bound(handler.body)
