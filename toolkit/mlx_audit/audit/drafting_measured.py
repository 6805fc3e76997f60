"""The exactness class of a drafted variant, as measured on its tiny model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import ModuleType
from typing import Any

from mlx_audit.checks.base import execute
from mlx_audit.checks.parity import TeacherForcedLogits
from mlx_audit.checks.subject import Subject


def exactness(module: ModuleType, tiny: Mapping[str, Any], family: str) -> tuple[str, str]:
    """Return `exact` where compiled decoding gave eager's bits, else `reordered`; and how that was found."""
    config = dict(tiny)
    subject = Subject(family, "default", "tiny", module, config, config, exactness="exact")
    check = TeacherForcedLogits()
    result = execute(check, subject, {})
    if result.status == "pass":
        return "exact", "measured: the logits of tiny equal eager decoding's, bit for bit"
    reordered = replace(subject, exactness="reordered")
    if execute(check, reordered, {}).status == "pass":
        return (
            "reordered",
            "measured: the logits of tiny differ from eager decoding's as sums in another order do",
        )
    default = replace(subject, exactness="").exactness_class
    return default, f"not measured, by the caches alone: {result.reason}"
