"""Digests of what a proof rests on: the model's code, and our own caches, adapters and decode."""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import json
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import yaml

import mlx_audit
from mlx_audit.manifests import Manifest

_OWN = ("caches", "adapters", "adapters/special", "decode")
_MODELS = "mlx_lm.models"
_UNREADABLE = (SyntaxError, ValueError, RecursionError, MemoryError)
"""What Python's parser raises for a text that is no Python, or is nested too deeply."""


def model_digest(module: str) -> str:
    """Return the digest of a model module and of what it imports, transitively, within `mlx_lm.models`.

    Syntax trees are digested, so comments, docstrings and layout don't count. Nothing is imported or executed.

    Args:
        module: Full name such as `mlx_lm.models.llama`.
    """
    return _digest(_closure(_module_path(module)))


def file_digest(path: Path) -> str:
    """Return the digest of a model file that lies outside mlx-lm; its imports of mlx-lm's models count."""
    return _digest(_closure(path))


def files_digest(paths: Iterable[Path], *texts: str) -> str:
    """Return the digest of the syntax trees of several files, and of texts that belong to them."""
    total = hashlib.sha256(_digest(paths).encode())
    for text in texts:
        total.update(b"\0" + text.encode())
    return f"sha256:{total.hexdigest()}"


def manifest_digest(manifest: Manifest) -> str:
    """Return the digest of what a manifest states about its family; prose, sources and claims don't count."""
    stated = yaml.safe_load(manifest.path.read_text(encoding="utf-8"))
    for key in ("about", "sources", "requires", "configurations"):
        stated.pop(key, None)
    for variant in stated["variants"].values():
        variant.pop("claims", None)
    return f"sha256:{hashlib.sha256(json.dumps(stated, sort_keys=True).encode()).hexdigest()}"


@cache
def toolkit_digest() -> str:
    """Return the digest of our own code that a proof depends on: caches, adapters and decode."""
    root = Path(mlx_audit.__file__).parent
    return _digest(path for part in _OWN for path in sorted((root / part).glob("*.py")))


def mlx_lm_models() -> Path:
    """Return the installed folder `mlx_lm/models`, found without importing mlx-lm."""
    spec = importlib.util.find_spec("mlx_lm")
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError("mlx_lm is not installed")
    return Path(spec.submodule_search_locations[0]) / "models"


def _module_path(module: str) -> Path:
    return mlx_lm_models() / f"{module.removeprefix(_MODELS + '.')}.py"


def _closure(start: Path) -> list[Path]:
    """Return `start` and all files of `mlx_lm/models` that it imports, sorted by name but for the first."""
    found: dict[str, Path] = {}
    waiting = [start]
    while waiting:
        path = waiting.pop()
        for name in _imports(path):
            target = mlx_lm_models() / f"{name}.py"
            if name not in found and target.is_file() and target != start:
                found[name] = target
                waiting.append(target)
    return [start, *(found[name] for name in sorted(found))]


def _imports(path: Path) -> Iterator[str]:
    """Yield the names of modules in `mlx_lm.models` that a file imports; none where it is no Python."""
    try:
        tree = _tree(path)
    except _UNREADABLE:
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level == 1:
                yield from [base.split(".")[0]] if base else [alias.name for alias in node.names]
            elif base == _MODELS:
                yield from (alias.name for alias in node.names)
            elif base.startswith(f"{_MODELS}."):
                yield base.removeprefix(f"{_MODELS}.").split(".")[0]
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.startswith(f"{_MODELS}."):
                    yield alias.name.removeprefix(f"{_MODELS}.").split(".")[0]


def _digest(paths: Iterable[Path]) -> str:
    total = hashlib.sha256()
    for path in paths:
        total.update(
            path.name.encode() + b"\0" + _tree_digest(path, path.stat().st_mtime_ns).encode() + b"\0"
        )
    return f"sha256:{total.hexdigest()}"


@cache
def _tree_digest(path: Path, _modified: int) -> str:
    try:
        return hashlib.sha256("".join(_dump(_tree(path))).encode()).hexdigest()
    except _UNREADABLE:  # then its bytes stand for it
        return hashlib.sha256(path.read_bytes()).hexdigest()


def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_bytes(), filename=str(path))


def _dump(node: object) -> Iterator[str]:
    """Yield a text of a syntax tree that leaves out empty fields, so that it is the same in all Python versions."""
    if isinstance(node, ast.AST):
        yield f"({type(node).__name__}"
        for name, value in ast.iter_fields(node):
            if name == "body" and isinstance(value, list) and value and _is_text(value[0]):
                value = value[1:]
            if value not in (None, []) and name not in ("kind", "type_comment"):
                yield f" {name}="
                yield from _dump(value)
        yield ")"
    elif isinstance(node, list):
        yield "["
        for item in node:
            yield from _dump(item)
        yield "]"
    else:
        yield repr(node)


def _is_text(node: object) -> bool:
    """Return whether a statement is a docstring."""
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )
