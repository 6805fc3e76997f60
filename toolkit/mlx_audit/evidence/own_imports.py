"""Which imports of a user's model file does no digest cover? Read from its text; nothing is imported."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

from mlx_audit.evidence.compiled_files import parsed, stamp
from mlx_audit.evidence.digests import mlx_lm_models

COVERED = frozenset({"mlx", "mlx_lm", "mlx_audit", "numpy"})
"""Packages, beside the standard library, that a model file may import: they are installed, not edited."""

_DYNAMIC = frozenset({"__import__", "import_module", "exec", "eval"})


def foreign_imports(path: Path) -> list[str]:
    """Return what a model file imports beside MLX, mlx-lm, NumPy and the standard library, as it is written there.

    A record holds a digest of the file and of mlx-lm's models, so other code may change and leave the record valid.
    """
    return list(_foreign_imports(str(path), *stamp(str(path))))


@lru_cache(maxsize=64)
def _foreign_imports(path: str, *_stamp: int) -> tuple[str, ...]:
    return tuple(dict.fromkeys(found for node in ast.walk(parsed(path)) for found in _foreign(node)))


def _foreign(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Import):
        for alias in node.names:
            if not _is_covered(alias.name):
                yield f"import {alias.name}"
    elif isinstance(node, ast.ImportFrom):
        base = "." * node.level + (node.module or "")
        for alias in node.names:
            name = base if node.module else base + alias.name
            if not (_is_mlx_lm(node.level, name) if node.level else _is_covered(name)):
                yield f"from {base} import {alias.name}"
    elif isinstance(node, ast.Call):
        name = getattr(node.func, "id", "")
        if name in _DYNAMIC or getattr(node.func, "attr", "") == "import_module":
            yield f"{name or 'import_module'}(…)"


def _is_covered(module: str) -> bool:
    first = module.split(".")[0]
    return first in COVERED or first in sys.stdlib_module_names


def _is_mlx_lm(level: int, name: str) -> bool:
    """Return whether a relative import is found where the audit looks for it, in `mlx_lm.models` or above."""
    folder = mlx_lm_models()
    if level > 2:
        return False
    folder = folder if level == 1 else folder.parent
    target = folder.joinpath(*name.lstrip(".").split("."))
    return target.with_name(f"{target.name}.py").is_file() or target.is_dir()
