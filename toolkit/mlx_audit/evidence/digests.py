"""Digests of what a proof rests on: the model's code, and our own caches, adapters and decode."""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import yaml

import mlx_audit
from mlx_audit.manifests import Manifest

OWN = ("caches", "adapters", "adapters/special", "decode")
"""Folders of the package whose code a proof depends on."""

_MODELS = "mlx_lm.models"
_FOLDER = "mlx_lm/models"
_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""The same language; the one in C is not everywhere."""

_UNREADABLE = (SyntaxError, ValueError, RecursionError, MemoryError)
"""What Python's parser raises for a text that is no Python, or is nested too deeply."""


def model_digest(module: str) -> str:
    """Return the digest of a model module and of what it imports, transitively, within `mlx_lm.models`.

    Syntax trees are digested, so comments, docstrings and layout don't count. Nothing is imported or executed.

    Args:
        module: Full name such as `mlx_lm.models.llama`.
    """
    return total(model_files(module))


def model_files(module: str) -> dict[str, str]:
    """Return the digest of each file that `model_digest` covers by its name, such as `mlx_lm/models/llama.py`."""
    return _trees(_closure(_module_path(module)), f"{_FOLDER}/")


def file_digest(path: Path) -> str:
    """Return the digest of a model file that lies outside mlx-lm; its imports of mlx-lm's models count."""
    return total(file_files(path))


def file_files(path: Path) -> dict[str, str]:
    """Return the digest of each file that `file_digest` covers, by name; the file itself is `./mine.py`, and first."""
    start, *others = _closure(path)
    return {**_trees([start], "./"), **_trees(others, f"{_FOLDER}/")}


def with_texts(digest: str, *texts: str) -> str:
    """Return the digest of files whose own one is known, and of texts that belong to them."""
    whole = hashlib.sha256(digest.encode())
    for text in texts:
        whole.update(b"\0" + text.encode())
    return f"sha256:{whole.hexdigest()}"


def total(files: Mapping[str, str]) -> str:
    """Return the digest of several files from those of each, in the order given; folders don't count."""
    whole = hashlib.sha256()
    for name, digest in files.items():
        whole.update(name.rpartition("/")[2].encode() + b"\0" + digest.encode() + b"\0")
    return f"sha256:{whole.hexdigest()}"


def tree_digest(path: Path) -> str:
    """Return the digest of one file's syntax tree, in hexadecimal digits."""
    return _tree_digest(path, path.stat().st_mtime_ns)


def ordered(module: str, files: Mapping[str, str]) -> dict[str, str]:
    """Return the files of a model in the order of their digest: its own first, then those that it imports."""
    first = module if module.startswith("./") else f"{_FOLDER}/{module.removeprefix(_MODELS + '.')}.py"
    return {name: files[name] for name in sorted(files, key=lambda name: (name != first, _stem(name)))}


def ordered_toolkit(files: Mapping[str, str]) -> dict[str, str]:
    """Return files of our own in the order in which they are digested."""
    parts = [f"mlx_audit/{part}" for part in OWN]
    known = [name for name in files if name.rpartition("/")[0] in parts]
    return {n: files[n] for n in sorted(known, key=lambda n: (parts.index(n.rpartition("/")[0]), n))}


def _stem(name: str) -> str:
    return name.rpartition("/")[2].removesuffix(".py")


def model_paths(manifest: Manifest) -> list[Path]:
    """Return the files of a family's model: its own and those that it imports; its own alone when that is not there."""
    own = manifest.module.startswith("./")
    start = manifest.path.parent / manifest.module if own else _module_path(manifest.module)
    return _closure(start) if start.is_file() else [start]


def model_path(manifest: Manifest, name: str) -> Path:
    """Return where a file of a model lies now, or would lie, that a record names."""
    folder, _, file = name.rpartition("/")
    return (manifest.path.parent if folder == "." else mlx_lm_models()) / file


def manifest_digest(manifest: Manifest) -> str:
    """Return the digest of what a manifest states about its family; prose, sources and claims don't count."""
    stated = yaml.load(manifest.path.read_text(encoding="utf-8"), Loader=_LOADER)
    for key in ("about", "sources", "requires", "configurations"):
        stated.pop(key, None)
    for variant in stated["variants"].values():
        variant.pop("claims", None)
    return f"sha256:{hashlib.sha256(json.dumps(stated, sort_keys=True).encode()).hexdigest()}"


@cache
def toolkit_digest() -> str:
    """Return the digest of our own code that a proof depends on: caches, adapters and decode."""
    return total(toolkit_files())


@cache
def faults_digest() -> str:
    """Return the digest of what kills planted faults: the checks, the tracer and the faults themselves."""
    return total(own_files("checks", "tracing", "faults"))


def prefix_files() -> dict[str, str]:
    """Return the digest of each file that the claim `prefix_restore` rests on beside the others, by name."""
    return own_files("prefix")


@cache
def prefix_digest() -> str:
    """Return the digest of our own code that restores prefixes; compiled decoding does not rest on it."""
    return total(prefix_files())


def toolkit_files() -> dict[str, str]:
    """Return the digest of each file that `toolkit_digest` covers, by name: `mlx_audit/caches/slots.py`."""
    return own_files(*OWN)


def own_files(*parts: str) -> dict[str, str]:
    """Return the digest of each Python file in folders of the package, by name."""
    root = package()
    return {
        f"mlx_audit/{part}/{path.name}": tree_digest(path)
        for part in parts
        for path in sorted((root / part).glob("*.py"))
    }


def package() -> Path:
    """Return the folder of our own package."""
    return Path(mlx_audit.__file__).parent


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
        for name in _looked_at(path, path.stat().st_mtime_ns)[1]:
            target = mlx_lm_models() / f"{name}.py"
            if name not in found and target.is_file() and target != start:
                found[name] = target
                waiting.append(target)
    return [start, *(found[name] for name in sorted(found))]


@cache
def _looked_at(path: Path, _modified: int) -> tuple[str, tuple[str, ...]]:
    """Return the digest of a model file, and the names of the modules in `mlx_lm.models` that it imports."""
    try:
        tree = _tree(path)
        return _hashed(tree), tuple(_imports(tree))
    except _UNREADABLE:
        return _tree_digest(path, _modified), ()


def _imports(tree: ast.Module) -> Iterator[str]:
    """Yield the names of modules in `mlx_lm.models` that a file imports."""
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


def _trees(paths: Iterable[Path], prefix: str) -> dict[str, str]:
    return {f"{prefix}{path.name}": _looked_at(path, path.stat().st_mtime_ns)[0] for path in paths}


@cache
def _tree_digest(path: Path, _modified: int) -> str:
    try:
        return _hashed(_tree(path))
    except _UNREADABLE:  # then its bytes stand for it
        return hashlib.sha256(path.read_bytes()).hexdigest()


def _hashed(tree: ast.Module) -> str:
    parts: list[str] = []
    _dump(tree, parts.append)
    return hashlib.sha256("".join(parts).encode()).hexdigest()


def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_bytes(), filename=str(path))


def _dump(node: object, write: Callable[[str], None]) -> None:
    """Write a text of a syntax tree that leaves out empty fields, so that it is the same in all Python versions."""
    if isinstance(node, ast.AST):
        write(f"({type(node).__name__}")
        for name in node._fields:
            value = getattr(node, name, None)
            if name == "body" and isinstance(value, list) and value and _is_text(value[0]):
                value = value[1:]
            if value is not None and value != [] and name not in ("kind", "type_comment"):
                write(f" {name}=")
                _dump(value, write)
        write(")")
    elif isinstance(node, list):
        write("[")
        for item in node:
            _dump(item, write)
        write("]")
    else:
        write(repr(node))


def _is_text(node: object) -> bool:
    """Return whether a statement is a docstring."""
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )
