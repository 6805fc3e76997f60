"""A `.gguf` file as TARGET, and lazy models whose modules are quantized differently."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

import gguf_files
from mlx_audit.errors import TargetError
from mlx_audit.models.build import build_lazy, resolve_arguments
from mlx_audit.models.checkpoint import Checkpoint
from mlx_audit.models.smollm2 import smollm2_path
from mlx_audit.models.target import resolve_target
from real_checkpoints import write_gguf
from tiny_models import config_of, module_of

QUANTIZED = {"token_embd": gguf_files.KIND_Q8_0, "attn": gguf_files.KIND_Q4_1, "ffn": gguf_files.KIND_Q4_1}


def shapes(model: Any) -> dict[str, Any]:
    return {name: array.shape for name, array in tree_flatten(model.parameters())}


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_a_file_is_a_checkpoint_of_its_family(family: str, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "some-model.gguf", family, QUANTIZED)
    target = resolve_target(str(path))
    assert (target.kind, target.family, target.module) == ("checkpoint", family, f"mlx_lm.models.{family}")
    assert (target.folder, target.config_name) == (path.resolve(), "some-model")
    assert target.manifest is not None
    assert target.config is not None
    assert target.config["quantization"]["model.embed_tokens"] == {"group_size": 32, "bits": 8}


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_the_lazy_model_has_the_parameters_of_the_real_one(family: str, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", family, QUANTIZED)
    config = dict(resolve_target(str(path)).config or {})
    module = module_of(family)
    lazy = build_lazy(module, resolve_arguments(module, config), quantization=config["quantization"])
    assert shapes(lazy) == shapes(Checkpoint(path).model)


def test_modules_may_have_their_own_bits_or_none() -> None:
    module = module_of("llama")
    arguments = resolve_arguments(module, config_of("llama", hidden_size=64))
    quantization = {
        "group_size": 32,
        "bits": 4,
        "lm_head": {"group_size": 64, "bits": 8},
        "model.layers.0.mlp.down_proj": False,
    }
    model: Any = build_lazy(module, arguments, quantization=quantization)
    assert (model.lm_head.bits, model.lm_head.group_size) == (8, 64)
    assert model.model.layers[0].mlp.down_proj.weight.dtype == mx.float32
    assert model.model.layers[1].mlp.down_proj.bits == 4


def test_smollm2_names_the_installed_file() -> None:
    target = resolve_target("smollm2")
    assert target.folder == smollm2_path().resolve()
    assert (target.family, target.config_name) == ("llama", "SmolLM2-135M-Instruct.Q4_1")


def test_what_cannot_serve_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TargetError, match="No such file"):
        resolve_target(str(tmp_path / "nothing.gguf"))
    damaged = tmp_path / "damaged.gguf"
    damaged.write_bytes(b"GGUF")
    with pytest.raises(TargetError, match="damaged"):
        resolve_target(str(damaged))
    config = tmp_path / "config.json"
    config.write_text("{}", encoding="utf-8")
    with pytest.raises(TargetError, match="its own configuration"):
        resolve_target(str(write_gguf(tmp_path / "x.gguf")), config)
