"""Building models: full-size ones whose weights stay lazy, and tiny ones with weights that tests can see through."""

from __future__ import annotations

import math
from collections.abc import Mapping
from copy import deepcopy
from types import ModuleType
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_audit.errors import TargetError, describe

DTYPES = {"float32": mx.float32, "bfloat16": mx.bfloat16, "float16": mx.float16}

WEIGHT_SCALE = 3.0
"""Greedy tokens of default tiny weights hardly vary, so that a wrong position would not show in them."""


def resolve_arguments(module: ModuleType, config: Mapping[str, Any]) -> Any:
    """Return the module's `ModelArgs` for a configuration, defaults applied.

    Raises:
        TargetError: the configuration lacks a value or has one of a wrong type.
    """
    try:
        # A copy all the way down: some arguments' classes rewrite the nested values that they are given.
        return module.ModelArgs.from_dict(deepcopy(dict(config)))
    except Exception as error:
        raise TargetError(
            "the configuration does not fit the model",
            where=module.__name__,
            found=describe(error),
        ) from error


def declared_arguments(module: ModuleType, config: Mapping[str, Any], path: str = "args") -> Any:
    """Return the arguments that a manifest's expressions speak of: those that the built model keeps at `path`.

    A nested configuration is resolved only when the model is built, which costs some 30 ms at any size.

    Raises:
        TargetError: the configuration does not fit, or there is nothing at `path`.
    """
    arguments = resolve_arguments(module, config)
    if path == "args":
        return arguments
    found: Any = build_lazy(module, arguments)
    for name in path.split("."):
        try:
            found = getattr(found, name)
        except AttributeError as error:
            raise TargetError(
                "the model does not keep its arguments where the manifest says",
                where=f"{module.__name__}: {path}",
                found=error,
                fix=f"correct `arguments: {path}`",
            ) from error
    return found


def build_lazy(
    module: ModuleType, arguments: Any, *, dtype: str = "float32", quantization: Any = None
) -> nn.Module:
    """Return a model of any size whose parameters are never evaluated.

    Args:
        module: A model module.
        arguments: Its resolved `ModelArgs`.
        dtype: A key of `DTYPES`.
        quantization: mlx-lm's `quantization` entry (`bits`, `group_size`, modules that have their own), or None.
    """
    try:
        model: nn.Module = module.Model(arguments)
        model.eval()
        model.set_dtype(DTYPES[dtype])
        if isinstance(quantization, Mapping):
            _quantize(model, quantization)
    except Exception as error:
        raise TargetError(
            "the model cannot be built from this configuration",
            where=module.__name__,
            found=describe(error),
        ) from error
    return model


def _quantize(model: nn.Module, quantization: Mapping[str, Any]) -> None:
    """Quantize as mlx-lm's loader does: an entry named like a module holds its own settings, or False."""

    def settings(path: str, module: nn.Module) -> bool | dict[str, Any]:
        if path in quantization:
            own = quantization[path]
            return dict(own) if isinstance(own, Mapping) else bool(own)
        return hasattr(module, "to_quantized")

    nn.quantize(
        model,
        group_size=quantization["group_size"],
        bits=quantization["bits"],
        mode=quantization.get("mode", "affine"),
        class_predicate=settings,
    )


def build_tiny(module: ModuleType, arguments: Any, *, seed: int, dtype: str = "float32") -> nn.Module:
    """Return an evaluated model with random weights from `seed`, its matrices scaled so that tokens vary.

    Weights that the module leaves at zero for a checkpoint to fill are random, too: a zero kernel or gate would hide
    whatever passes it.
    """
    mx.random.seed(seed)
    model = build_lazy(module, arguments)

    def seen_through(array: mx.array) -> mx.array:
        if array.ndim < 2:
            return array
        if not mx.any(array).item():
            return mx.random.normal(array.shape) / math.sqrt(array.shape[-1])
        return array * WEIGHT_SCALE if array.ndim == 2 else array

    model.apply(seen_through)
    model.set_dtype(DTYPES[dtype])
    mx.eval(model.parameters())
    return model
