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

_SAME = {"deepseek_yarn": "yarn", "telechat3-yarn": "yarn"}
"""Other names under which `initialize_rope` builds the same."""


def rope_kind(arguments: Any) -> str:
    """Return mlx-lm's name of the RoPE kind: `default`, `linear`, `llama3`, `yarn`, `longrope`, `dynamic`, …

    Args:
        arguments: A model's resolved arguments, or a plain mapping; the text part of a nested one counts.
    """
    for name in ("rope_scaling", "rope_parameters"):
        scaling = _get(arguments, name)
        if isinstance(scaling, Mapping):
            kind = str(scaling.get("type") or scaling.get("rope_type") or "default")
            return _SAME.get(kind, kind)
    nested = _get(arguments, "text_config")
    return rope_kind(nested) if isinstance(nested, Mapping) else "default"


def tiny_name(kind: str, main: str) -> str:
    """Return the name of the tiny configuration of a RoPE kind: `tiny`, or `tiny+llama3` beside it."""
    return "tiny" if kind == main else f"tiny+{kind}"


def with_rope(config: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """Return a tiny configuration that uses a RoPE kind, scaled so that a few dozen tokens pass its thresholds.

    The kind is written where the configuration has it: in `text_config` of a wrapper, and among the
    `rope_parameters`, whose other entries (the base, an attention scale) stay.
    """
    if isinstance(text := config.get("text_config"), Mapping):
        return {**config, "text_config": with_rope(text, kind)}
    scaling = {"rope_type": kind, **_TINY_SCALING.get(kind, {})}
    if isinstance(parameters := config.get("rope_parameters"), Mapping):
        kept = {name: value for name, value in parameters.items() if name != "type"}
        return {**config, "rope_parameters": kept | scaling}
    return {**config, "rope_scaling": None if kind == "default" else scaling}


def _get(arguments: Any, name: str) -> Any:
    return arguments.get(name) if isinstance(arguments, Mapping) else getattr(arguments, name, None)
