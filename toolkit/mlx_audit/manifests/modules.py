"""A model's module, found and read as a file; nothing of mlx-lm is imported or run."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from mlx_audit.manifests.files import read_bounded, real
from mlx_audit.manifests.suggestions import did_you_mean

PACKAGE = "mlx_lm.models"

LARGEST = 2 * 1024 * 1024
"""Bytes of a module that is read."""


def module_file(folder: Path, module: str) -> Path | None:
    """The file of a manifest's module, which need not exist; None when mlx-lm is not installed.

    Args:
        folder: The manifest's folder, which `./file.py` is relative to.
        module: `mlx_lm.models.<name>` or `./file.py`.
    """
    if module.startswith("./"):
        return folder / module
    models = models_folder()
    return None if models is None else models / f"{module.removeprefix(PACKAGE + '.')}.py"


def module_key(folder: Path, module: str) -> str:
    """What tells modules apart: the dotted name, or the absolute path of a file."""
    return str(real(folder / module)) if module.startswith("./") else module


@cache
def models_folder() -> Path | None:
    """The folder of mlx-lm's models; finding a top-level package does not run it."""
    spec = find_spec("mlx_lm")
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(next(iter(spec.submodule_search_locations))) / "models"


def missing(folder: Path, module: str) -> tuple[str, str | None] | None:
    """What is wrong with a manifest's module and how to mend it, or None."""
    path = module_file(folder, module)
    if path is None:
        return "mlx-lm is not installed", "pip install mlx-lm"
    if module.startswith("./") and real(path).parent != real(folder):
        return "the module lies outside the manifest's folder", "move it beside the manifest"
    if path.is_file():
        return None
    pattern, prefix = ("*.py", "./") if module.startswith("./") else ("[a-z]*.py", f"{PACKAGE}.")
    known = [
        f"{prefix}{other.name if prefix == './' else other.stem}"
        for other in sorted(path.parent.glob(pattern))
    ]
    return "no such module", did_you_mean(module, known)


def argument_names(folder: Path, module: str) -> frozenset[str] | None:
    """The names that the module's arguments can have; None when the module does not say.

    They are the fields of its dataclasses, and what their methods set on `self`, in the module and in the modules
    beside it that it imports from.
    """
    path = module_file(folder, module)
    if path is None or missing(folder, module) is not None:
        return None
    return _names(path)


@cache
def _names(path: Path) -> frozenset[str] | None:
    names: set[str] = set()
    waiting, seen = [path], {path}
    while waiting:
        read = _file_names(waiting.pop())
        if read is None:
            return None
        own, imports = read
        names |= own
        siblings = {
            folder / f"{name}.py" for name in imports for folder in (path.parent, models_folder()) if folder
        }
        waiting += sorted(sibling for sibling in siblings - seen if sibling.is_file())
        seen |= siblings
    return frozenset(names) or None


@cache
def _file_names(path: Path) -> tuple[frozenset[str], frozenset[str]] | None:
    """Return a file's own names and what it imports; each file is parsed once, as most families share some."""
    try:
        text = read_bounded(path, LARGEST)
        tree = ast.parse(text.decode("utf-8")) if len(text) <= LARGEST else None
    except (OSError, ValueError, SyntaxError, RecursionError, MemoryError):
        tree = None
    if tree is None:
        return None
    return frozenset(_dataclass_names(tree)), frozenset(_imports(tree))


def _dataclass_names(tree: ast.Module) -> Iterator[str]:
    for owner in tree.body:
        if not isinstance(owner, ast.ClassDef) or "dataclass" not in map(_decorator, owner.decorator_list):
            continue
        for node in ast.walk(owner):
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                yield node.target.id
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                yield node.attr


def _decorator(node: ast.expr) -> str:
    node = node.func if isinstance(node, ast.Call) else node
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def _imports(tree: ast.Module) -> Iterator[str]:
    """Names of sibling modules of mlx_lm.models that the module takes something from."""
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and (node.level == 1 or (node.module or "").startswith(PACKAGE)):
            module = (node.module or "").removeprefix(PACKAGE).lstrip(".")
            yield from [module] if module else [alias.name for alias in node.names]
