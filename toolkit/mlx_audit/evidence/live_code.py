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


def foreign_code(model: Any) -> list[str]:
    """Return why a model may behave otherwise than its source says; empty where all its code is MLX's and mlx-lm's.

    Looks at the class of every module, at the file that each class's `__call__` was compiled from (and a method
    `new_fixed_capacity_cache`, where there is one), and at dropout that is switched on. Weights, quantization and
    low-rank adapters of mlx-lm's own classes are fine.
    """
    found: dict[str, None] = {}
    for path, module in model.named_modules():
        cls = type(module)
        where = path or "the model"
        if cls.__module__.split(".")[0] not in _PACKAGES:
            found[f"{where} is a {cls.__module__}.{cls.__qualname__}"] = None
        else:
            found |= {f"{cls.__module__}.{cls.__qualname__}.{what}": None for what in _foreign_methods(cls)}
        for name, value in vars(module).items():
            if callable(value) and not _is_known(value):
                found[
                    f"{where}.{name} is {_home(value)}.{getattr(value, '__qualname__', type(value).__name__)}"
                ] = None
        if module.training and "Dropout" in cls.__name__ and getattr(module, "_p_1", 1.0) != 1.0:
            found[f"{where} drops values at random; call model.eval()"] = None
    return list(found)


def _is_known(value: Any) -> bool:
    if isinstance(value, partial):
        return _is_known(value.func)
    first = _home(value).split(".")[0]
    return first in _PACKAGES or first in sys.stdlib_module_names


def _home(value: Any) -> str:
    return str(getattr(value, "__module__", None) or type(value).__module__)


def _foreign_methods(cls: type) -> Iterator[str]:
    for name in ("__call__", _PROVIDES):
        method = inspect.getattr_static(cls, name, None)
        code = getattr(method, "__code__", None)
        if isinstance(code, CodeType) and not _is_packaged(Path(code.co_filename)):
            yield f"{name} comes from {Path(code.co_filename).name}"
        elif name == _PROVIDES and method is not None and not isinstance(code, CodeType):
            yield f"{name} is no plain method"


def _is_packaged(file: Path) -> bool:
    return any(file.is_relative_to(folder) for folder in _folders())


def _folders() -> list[Path]:
    folders: list[Path] = []
    for name in _PACKAGES:
        spec = sys.modules[name].__spec__ if name in sys.modules else find_spec(name)
        folders += [Path(location) for location in (spec.submodule_search_locations or [] if spec else [])]
    return folders
