"""Importing model code: mlx-lm's modules without the rest of mlx-lm, and a user's file as if it lay beside them."""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
import traceback
import zlib
from collections.abc import Mapping, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

from mlx_audit.errors import TargetError, describe

MODELS = "mlx_lm.models"

Overlay = Mapping[str, Path]
"""Sources to read in place of the installed ones: by module name, or by the path of a user's file."""

FILE_PREFIX = f"{MODELS}._mlx_audit_"
"""Begins the names of modules that are users' files."""


def import_model(module: str) -> ModuleType:
    """Return a module of `mlx_lm.models`, such as `mlx_lm.models.llama`.

    Raises:
        TargetError: there is none of this name, or it cannot be imported.
    """
    defer_mlx_lm()
    try:
        return _checked(importlib.import_module(module), module)
    except ImportError as error:
        raise TargetError(
            "the model module cannot be imported",
            where=module,
            found=describe(error),
            fix="install a newer mlx-lm",
        ) from error


def import_patched(target: str | Path, overlay: Overlay) -> tuple[ModuleType, ModuleType]:
    """Return a target's module as it is installed, and as it is with patched sources; for the rest of this process.

    The installed files are not touched. What imports a patched module is imported anew, so that no half of a model is
    the old one; the caches' own classes stay the same.

    Args:
        target: A module name, or a model file.
        overlay: The patched sources.

    Raises:
        TargetError: one of the two cannot be imported.
    """
    original = import_file(target) if isinstance(target, Path) else import_model(target)
    for name in [name for name in sys.modules if name.startswith(f"{MODELS}.") and name not in _KEPT]:
        del sys.modules[name]
        package = sys.modules[MODELS]
        vars(package).pop(name.rpartition(".")[2], None)
    sys.meta_path.insert(0, _Patched(overlay))
    patched = (
        import_file(overlay.get(str(target), target)) if isinstance(target, Path) else import_model(target)
    )
    loaded = {getattr(module, "__file__", None) for module in (patched, *sys.modules.values())}
    if unused := {str(path) for path in overlay.values()} - loaded:
        raise TargetError(
            "patched sources were not loaded", where=str(target), found=", ".join(sorted(unused))
        )
    return original, patched


_KEPT = frozenset(f"{MODELS}.{name}" for name in ("cache", "base"))
"""Not imported anew: our caches stand in for the classes of the first, and the second knows them by these."""


class _Patched(MetaPathFinder):
    """Finds the patched source of a module before the installed one."""

    def __init__(self, overlay: Overlay) -> None:
        self.overlay = overlay

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        found = self.overlay.get(name)
        return importlib.util.spec_from_file_location(name, found) if found is not None else None


def import_file(path: Path) -> ModuleType:
    """Return the module of a model file; its relative imports find mlx-lm's own models.

    The file is executed: only a path that the user typed comes here.

    Raises:
        TargetError: the file cannot be imported.
    """
    defer_mlx_lm()
    importlib.import_module(MODELS)
    name = _module_name(path)
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise TargetError("not a Python file", where=str(path), allowed="a model file that ends in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
        return _checked(module, str(path))
    except (Exception, SystemExit) as error:
        sys.modules.pop(name, None)
        if isinstance(error, TargetError):
            raise
        raise TargetError(
            "the model file cannot be imported", where=f"{path}:{_line(path, error)}", found=describe(error)
        ) from error


def defer_mlx_lm() -> None:
    """Make `import mlx_lm.models.…` skip mlx-lm's own `__init__`, which loads transformers, until it is asked for.

    An attribute of `mlx_lm` that is not there yet (`mlx_lm.load`) executes the real `__init__`.
    """
    if "mlx_lm" in sys.modules:
        return
    spec = importlib.util.find_spec("mlx_lm")
    if spec is None or spec.loader is None:
        raise TargetError("mlx-lm is not installed", fix="pip install mlx-lm")
    loader = spec.loader
    package = importlib.util.module_from_spec(spec)

    def load(name: str) -> Any:
        # import_module asks for dunder names of its own accord; they must not load anything.
        if name.startswith("__") and name != "__version__":
            raise AttributeError(name)
        package.__dict__.pop("__getattr__", None)
        loader.exec_module(package)
        return getattr(package, name)

    package.__dict__["__getattr__"] = load
    sys.modules["mlx_lm"] = package


def _module_name(path: Path) -> str:
    """A name for a file's module: dots in it would make parents, against which relative imports are resolved."""
    stem = re.sub(r"\W", "_", path.stem)
    # Two files whose names became the same are two modules.
    return f"{FILE_PREFIX}{stem}" + (
        "" if stem == path.stem else f"_{zlib.crc32(path.stem.encode('utf-8', 'surrogateescape')):08x}"
    )


def _line(path: Path, error: BaseException) -> int:
    """The last line of the file itself that was reached, or the one that could not be parsed."""
    if isinstance(error, SyntaxError) and error.filename == str(path) and error.lineno:
        return error.lineno
    frames = traceback.extract_tb(error.__traceback__)
    return next((f.lineno for f in reversed(frames) if f.filename == str(path) and f.lineno), 1)


def _checked(module: ModuleType, where: str) -> ModuleType:
    for name in ("Model", "ModelArgs"):
        if not isinstance(getattr(module, name, None), type):
            raise TargetError(
                f"the module has no class `{name}`",
                where=where,
                allowed="mlx-lm's layout: Model and ModelArgs",
            )
    return module
