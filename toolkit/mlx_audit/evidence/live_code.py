"""Is the code that a live model runs the code that was audited? Records speak of source files, not of objects."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import CodeType
from typing import Any

_PACKAGES = ("mlx", "mlx_lm")
_PROVIDES = "new_fixed_capacity_cache"
"""A model that has this method makes its caches itself."""


def own_file(model: Any) -> Path | None:
    """Return the file of a model that is none of mlx-lm's, as Python imported it."""
    file = _file_of(type(model).__module__)
    return None if file is None or _is_packaged(file) else file.resolve()


def foreign_code(model: Any, own: Path | None = None) -> list[str]:
    """Return why a model may behave otherwise than its source says; empty where all its code is MLX's and mlx-lm's.

    Looks at the class of every module, at the file that each class's `__call__` was compiled from (and a method
    `new_fixed_capacity_cache`, where there is one), and at dropout that is switched on. Weights, quantization and
    low-rank adapters of mlx-lm's own classes are fine.

    Args:
        model: A live model.
        own: The file of the model itself, where that is none of mlx-lm's and was audited.
    """
    found: dict[str, None] = {}
    for path, module in model.named_modules():
        cls = type(module)
        where = path or "the model"
        if not _is_known(cls, own):
            found[f"{where} is a {cls.__module__}.{cls.__qualname__}"] = None
        else:
            found |= {
                f"{cls.__module__}.{cls.__qualname__}.{what}": None for what in _foreign_methods(cls, own)
            }
        for name, value in vars(module).items():
            if callable(value) and not _is_known(value, own):
                found[
                    f"{where}.{name} is {_home(value)}.{getattr(value, '__qualname__', type(value).__name__)}"
                ] = None
        if module.training and "Dropout" in cls.__name__ and getattr(module, "_p_1", 1.0) != 1.0:
            found[f"{where} drops values at random; call model.eval()"] = None
    return list(found)


def _is_known(value: Any, own: Path | None) -> bool:
    if isinstance(value, partial):
        return _is_known(value.func, own)
    home = _home(value)
    first = home.split(".")[0]
    return first in _PACKAGES or first in sys.stdlib_module_names or _is_own(_file_of(home), own)


def _home(value: Any) -> str:
    return str(getattr(value, "__module__", None) or type(value).__module__)


def _file_of(module: str) -> Path | None:
    file = getattr(sys.modules.get(module), "__file__", None)
    return Path(file) if file is not None else None


def _is_own(file: Path | None, own: Path | None) -> bool:
    return own is not None and file is not None and file.resolve() == own


def _foreign_methods(cls: type, own: Path | None) -> Iterator[str]:
    for name in ("__call__", _PROVIDES):
        method = inspect.getattr_static(cls, name, None)
        code = getattr(method, "__code__", None)
        if isinstance(code, CodeType):
            file = Path(code.co_filename)
            if not (_is_packaged(file) or _is_own(file, own)):
                yield f"{name} comes from {file.name}"
        elif name == _PROVIDES and method is not None:
            yield f"{name} is no plain method"


def _is_packaged(file: Path) -> bool:
    return any(file.is_relative_to(folder) for folder in _folders())


def _folders() -> list[Path]:
    folders: list[Path] = []
    for name in _PACKAGES:
        spec = sys.modules[name].__spec__ if name in sys.modules else find_spec(name)
        folders += [Path(location) for location in (spec.submodule_search_locations or [] if spec else [])]
    return folders
