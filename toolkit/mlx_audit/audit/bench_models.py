"""The models that `bench` measures: a checkpoint, a family of any size with random weights, or a tiny one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_audit.errors import MlxAuditError
from mlx_audit.models.build import build_lazy, resolve_arguments
from mlx_audit.models.checkpoint import Checkpoint
from mlx_audit.models.modules import import_file, import_model
from mlx_audit.models.target import resolve_target

TINY = "tiny"
_TINY_CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 32,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": True,
}
"""So small that a step's time is that of its dispatch."""


def bench_model(text: str, config: Path | None, *, dtype: str, seed: int) -> nn.Module:
    """Return an evaluated model.

    Args:
        text: `tiny`, or a TARGET: a checkpoint, or anything else with `config`.
        config: A config.json.
        dtype: Of random weights, and of what is not packed in a GGUF file.
        seed: Of random weights.

    Raises:
        MlxAuditError: nothing of that name, or no configuration.
    """
    if text == TINY and config is None:
        return _random(import_model("mlx_lm.models.llama"), _TINY_CONFIG, dtype, seed)
    target = resolve_target(text, config)
    if target.folder is not None:
        return Checkpoint(target.folder, dtype=dtype).model
    if target.config is None:
        raise MlxAuditError(
            "a family needs a configuration", where=text, fix=f"mlx-audit bench {text} --config config.json"
        )
    module = import_file(target.file) if target.file is not None else import_model(str(target.module))
    return _random(module, dict(target.config), dtype, seed)


def _random(module: Any, config: dict[str, Any], dtype: str, seed: int) -> nn.Module:
    mx.random.seed(seed)
    arguments = resolve_arguments(module, config)
    model = build_lazy(module, arguments, dtype=dtype, quantization=config.get("quantization"))
    mx.eval(model.parameters())
    return model
