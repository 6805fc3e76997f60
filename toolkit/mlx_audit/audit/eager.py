"""Can the model run a configuration at all, without anything of ours?"""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn

from mlx_audit.checks.subject import Subject
from mlx_audit.errors import TargetError, describe
from mlx_audit.models.build import build_lazy
from mlx_audit.tracing.tracer import source_line


def require_runs(subject: Subject) -> None:
    """Refuse a configuration with which the model's own forward, on its own caches, raises.

    The model is a new one and nothing is evaluated, so that what the checks look at stays as it is.

    Raises:
        TargetError: names the exception and its place.
    """
    model = build_lazy(subject.module, subject.arguments, quantization=subject.config.get("quantization"))
    try:
        _forward(model)
    except Exception as error:
        raise TargetError(
            f"the model itself cannot run this configuration ({subject.variant} {subject.configuration})",
            where=source_line(error),
            found=describe(error),
            fix="correct the configuration, or the model's code",
        ) from error


def _forward(model: nn.Module) -> None:
    from mlx_lm.models.cache import make_prompt_cache

    model(mx.zeros((1, 2), mx.int32), cache=make_prompt_cache(model))
