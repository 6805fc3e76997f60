"""Failures on purpose: a layer that raises, and the demand that its exception comes out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache

from mlx_audit.adapters import ModuleState
from mlx_audit.checks.base import CheckFailed


class PlantedFailure(Exception):
    """Raised by a layer on purpose."""


def middle_layer(model: nn.Module) -> nn.Module:
    """Return the third layer, or the last where there are fewer; or a part of it, where the model calls only parts."""
    layers = getattr(model, "layers", None) or list(model.children().values())
    layer: nn.Module = layers[min(2, len(layers) - 1)]
    parts = [layer, *(part for part in layer.modules() if part is not layer)]
    return next((part for part in parts if _is_called(model, part)), layer)


def _is_called(model: nn.Module, part: nn.Module) -> bool:
    """Return whether a forward calls a module; nothing is evaluated, and the model stays as it is."""
    before = ModuleState(model)
    try:
        with failing(part):
            model(mx.zeros((1, 2), mx.int32), cache=make_prompt_cache(model))
    except PlantedFailure:
        return True
    finally:
        before.restore()
    return False


@contextmanager
def failing(layer: nn.Module, *, after: int = 0) -> Iterator[None]:
    """Make one layer raise from its call number `after` on; the module tree stays as it is."""
    own, calls = type(layer), 0

    def call(self: nn.Module, *arguments: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls > after:
            raise PlantedFailure
        return own.__call__(self, *arguments, **options)

    layer.__class__ = type(own.__name__, (own,), {"__call__": call})
    try:
        yield
    finally:
        layer.__class__ = own


def must_fail(call: Callable[[], object], label: str) -> None:
    """Require that a call raises the planted failure."""
    try:
        call()
    except PlantedFailure:
        return
    raise CheckFailed(f"a layer raised during {label}, but no exception came out", where=label)
