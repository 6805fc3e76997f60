"""Which kind of rotary embedding a configuration asks for, and the arguments that ask for another one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_TINY_SCALING: dict[str, dict[str, Any]] = {
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 4.0},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    },
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 16},
    "longrope": {"original_max_position_embeddings": 16, "short_factor": 1.0, "long_factor": 2.0},
    "proportional": {"factor": 2.0},
}


def rope_kind(arguments: Any) -> str:
    """Return mlx-lm's name of the RoPE kind: `default`, `linear`, `llama3`, `yarn`, `longrope`, `dynamic`, …

    Args:
        arguments: A model's resolved arguments, or a plain mapping.
    """

    def get(name: str) -> Any:
        return arguments.get(name) if isinstance(arguments, Mapping) else getattr(arguments, name, None)

    for name in ("rope_scaling", "rope_parameters"):
        scaling = get(name)
        if isinstance(scaling, Mapping):
            return str(scaling.get("type") or scaling.get("rope_type") or "default")
    return "default"


def tiny_name(kind: str, main: str) -> str:
    """Return the name of the tiny configuration of a RoPE kind: `tiny`, or `tiny+llama3` beside it."""
    return "tiny" if kind == main else f"tiny+{kind}"


def with_rope(config: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """Return a tiny configuration that uses a RoPE kind, scaled so that a few dozen tokens pass its thresholds."""
    scaling = None if kind == "default" else {"rope_type": kind, **_TINY_SCALING.get(kind, {})}
    return {**config, "rope_scaling": scaling}
