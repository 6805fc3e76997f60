"""What the functions of a Python file compile to now, to compare with the functions that run."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator, Mapping
from functools import lru_cache
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType
from typing import Any

_HAS_DOCSTRING = getattr(inspect, "CO_HAS_DOCSTRING", None)
"""A flag of newer Pythons; before, the first constant of a function is its docstring."""


class CompiledFile:
    """The code of one Python file, by qualified name; nothing is executed."""

    def __init__(self, path: str) -> None:
        module = _compile(path)
        self.names: frozenset[str] = frozenset(module.co_names if module is not None else ())
        """What the top level of the file mentions: functions that it imports or renames among others."""
        self._prints: dict[str, set[Any]] = {}
        self._known: dict[int, CodeType] = {}
        for code in _nested(module) if module is not None else ():
            self._prints.setdefault(code.co_qualname, set()).add(_print(code))

    def defines(self, qualname: str) -> bool:
        """Return whether the file has a function or class of this qualified name."""
        return qualname in self._prints

    def has(self, code: CodeType) -> bool:
        """Return whether the file still has this code under this name; docstrings and lines don't count."""
        if id(code) in self._known:
            return True
        same = _print(code) in self._prints.get(code.co_qualname, ())
        if same:
            self._known[id(code)] = code  # held, so that no other code gets its id
        return same


def compiled_file(path: str) -> CompiledFile:
    """Return what a file compiles to as it is now; compiled anew where it has changed."""
    return _compiled(path, *stamp(path))


@lru_cache(maxsize=1024)
def _compiled(path: str, _modified: int, _size: int, _inode: int) -> CompiledFile:
    return CompiledFile(path)


def literals(path: Path) -> Mapping[str, str]:
    """Return the plain values that a file gives to names and to arguments, as text, by qualified name.

    `WINDOW = 8` is there as `WINDOW`, in a class as `Model.WINDOW`; defaults of a function `f` as `f()`. Names that are
    assigned more than once, and values that may change in place, are left out.
    """
    return _literals(str(path), *stamp(str(path)))


@lru_cache(maxsize=64)
def _literals(path: str, *_stamp: int) -> Mapping[str, str]:
    tree = parsed(path)
    # What a function assigns as `global` is a state, no constant.
    changed = {name for node in ast.walk(tree) if isinstance(node, ast.Global) for name in node.names}
    return {name: text for name, text in _given(tree.body) if name not in changed}


def _given(body: list[ast.stmt], prefix: str = "") -> Iterator[tuple[str, str]]:
    stored = [
        node.id
        for statement in body
        if not isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        for node in ast.walk(statement)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    ]
    for node in body:
        if isinstance(node, ast.ClassDef):
            yield from _given(node.body, f"{prefix}{node.name}.")
        elif isinstance(node, ast.FunctionDef):
            values = [_plain(value) for value in (*node.args.defaults, *filter(None, node.args.kw_defaults))]
            if values and None not in values:
                yield f"{prefix}{node.name}()", " ".join(map(str, values))
        elif isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            value = _plain(node.value)
            if isinstance(target, ast.Name) and stored.count(target.id) == 1 and value is not None:
                yield f"{prefix}{target.id}", value


def _plain(node: ast.expr) -> str | None:
    try:
        value = ast.literal_eval(node)
        hash(value)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return None
    return repr(value)


def stamp(path: str) -> tuple[int, int, int]:
    """Return what changes when a file is written or replaced."""
    try:
        found = Path(path).stat()
    except OSError:
        return 0, 0, 0
    return found.st_mtime_ns, found.st_size, found.st_ino


def parsed(path: str) -> ast.Module:
    """Return the syntax tree of a file; an empty one where it is no Python."""
    try:
        return ast.parse(Path(path).read_bytes(), filename=path)
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return ast.Module([], [])


def _compile(path: str) -> CodeType | None:
    """Compile the text itself: a cached compilation may be of another text of the same second and size."""
    try:
        return SourceFileLoader("file", path).source_to_code(Path(path).read_bytes(), path)
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _nested(code: CodeType) -> Iterator[CodeType]:
    for value in code.co_consts:
        if isinstance(value, CodeType):
            yield value
            yield from _nested(value)


def _print(code: CodeType) -> tuple[Any, ...]:
    return (
        code.co_code,
        tuple(_constant(value) for value in _constants(code)),
        (code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars),
        (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags),
        getattr(code, "co_exceptiontable", b""),
    )


def _constants(code: CodeType) -> tuple[Any, ...]:
    first, *rest = code.co_consts or (None,)
    if _HAS_DOCSTRING is None:
        documented = isinstance(first, str) and not code.co_name.startswith("<")
    else:
        documented = bool(code.co_flags & _HAS_DOCSTRING)
    return (None if documented else first, *rest)


def _constant(value: Any) -> Any:
    if isinstance(value, CodeType):
        return _print(value)
    if isinstance(value, tuple):
        return tuple(_constant(item) for item in value)
    if isinstance(value, frozenset):
        return tuple(sorted(repr(item) for item in value))
    return type(value).__name__, repr(value)  # 1, 1.0 and True are equal, and 0.0 and -0.0
