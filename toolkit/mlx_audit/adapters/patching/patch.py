"""Patching one file: every codemod, until nothing changes."""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import libcst as cst

from mlx_audit.adapters.patching import codemods as package
from mlx_audit.adapters.patching.base import Codemod
from mlx_audit.errors import TargetError, describe

LARGEST_SOURCE = 2 << 20
"""Bytes; mlx-lm's largest model file has a thirtieth of them."""

DEEPEST_SOURCE = 100
"""Levels of syntax; mlx-lm's deepest model file has a quarter of them."""

_ROUNDS = 4
_BYTE_ORDER_MARK = "\ufeff"


@dataclass(frozen=True)
class PatchedSource:
    """A source before and after its patch.

    Attributes:
        module: `mlx_lm.models.afm7` for one of mlx-lm's own, otherwise the stem of a user's file.
        path: The file that was read; it is not changed.
        before: Its text, line ends as they are.
        after: The patched text; equal to `before` where no codemod found anything.
        applied: Names of the codemods that changed something.
    """

    module: str
    path: Path
    before: str
    after: str
    applied: tuple[str, ...]


def patch_source(path: Path, module: str = "") -> PatchedSource:
    """Return a source with everything mended that there is a codemod for; nothing of it is executed.

    Args:
        path: A Python file.
        module: The dotted name of a module of mlx-lm; by default the file is the user's own.

    Raises:
        TargetError: the file cannot be read, or is no Python that can be patched.
    """
    module = module or path.stem
    before = _text(path)
    mark = _BYTE_ORDER_MARK if before.startswith(_BYTE_ORDER_MARK) else ""
    tree = _parsed(path, before.removeprefix(mark))
    applied: dict[str, None] = {}
    mods = [mod for mod in codemods() if mod.module in ("", module.rpartition(".")[2])]
    for _ in range(_ROUNDS):
        unchanged = tree
        for mod in mods:
            mended = mod.apply(tree)
            if mended is not tree and mended.code != tree.code:
                applied[mod.name] = None
                tree = mended
        if tree is unchanged:
            return PatchedSource(module, path, before, mark + tree.code, tuple(applied))
    raise TargetError("the patch does not come to rest", where=str(path), found=", ".join(applied))


@cache
def codemods() -> tuple[Codemod, ...]:
    """Return one of each codemod in `patching/codemods/`, in the order of their names."""
    found: list[Codemod] = []
    for info in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
        for cls in vars(importlib.import_module(info.name)).values():
            if (
                isinstance(cls, type)
                and issubclass(cls, Codemod)
                and not inspect.isabstract(cls)
                and cls.__module__ == info.name
            ):
                found.append(cls())
    return tuple(sorted(found, key=lambda mod: mod.name))


def _text(path: Path) -> str:
    try:
        with path.open("rb") as file:
            data = file.read(LARGEST_SOURCE + 1)
        if len(data) > LARGEST_SOURCE:
            raise TargetError(
                "the source is too large to patch",
                where=str(path),
                found=f"{path.stat().st_size:,} bytes",
                allowed=f"at most {LARGEST_SOURCE:,} bytes",
                fix="move what is not the model's forward, such as tables, to a file of its own",
            )
        return data.decode()
    except OSError as error:
        raise TargetError("the source cannot be read", where=str(path), found=describe(error)) from error
    except UnicodeDecodeError as error:
        raise TargetError(
            "the source is not UTF-8", where=str(path), found=describe(error), fix="save it as UTF-8"
        ) from error


def _parsed(path: Path, text: str) -> cst.Module:
    # Python's own parser goes first: libcst's overflows the stack where an expression nests without end.
    try:
        depth = _depth(ast.parse(text))
    except SyntaxError as error:
        raise TargetError(
            "the source is not valid Python",
            where=f"{path}:{error.lineno or 1}:{error.offset or 1}",
            found=error.msg,
            fix="correct the line",
        ) from error
    except (ValueError, RecursionError, MemoryError) as error:
        raise TargetError("the source is not valid Python", where=str(path), found=describe(error)) from error
    if depth > DEEPEST_SOURCE:
        raise TargetError(
            "the source is nested too deeply to patch",
            where=str(path),
            found=f"{depth} levels",
            allowed=f"at most {DEEPEST_SOURCE}",
            fix="split its longest expression",
        )
    try:
        return cst.parse_module(text)
    except cst.ParserSyntaxError as error:
        raise TargetError(
            "libcst cannot parse the source",
            where=f"{path}:{error.raw_line}:{error.raw_column}",
            found=error.message,
            fix="install a newer libcst",
        ) from error


def _depth(tree: ast.AST) -> int:
    depth, level = 0, [tree]
    while level:
        depth, level = depth + 1, [child for node in level for child in ast.iter_child_nodes(node)]
    return depth
