"""CKP001-002: the same on weights from a folder."""

from __future__ import annotations

import json
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten

from audited import green, new_subject, only, red
from mlx_audit.faults import FAULTS
from tiny_models import config_of, tiny_model


@pytest.fixture(scope="module", params=["bfloat16", "4 bits"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny qwen2 as an MLX checkpoint folder."""
    path = tmp_path_factory.mktemp("checkpoint")
    config = config_of("qwen2", hidden_size=64, intermediate_size=64)
    model = tiny_model("qwen2", dtype="bfloat16", hidden_size=64, intermediate_size=64)
    if request.param == "4 bits":
        nn.quantize(model, group_size=64, bits=4)
        config["quantization"] = {"group_size": 64, "bits": 4}
    mx.save_safetensors(
        str(path / "model.safetensors"), dict(tree_flatten(model.parameters())), {"format": "mlx"}
    )
    (path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return path


@pytest.mark.parametrize("code", ["CKP001", "CKP002"])
def test_healthy(code: str, folder: Path) -> None:
    figures = green(code, new_subject("qwen2", checkpoint=folder)).figures
    assert figures.get("dtype", "bfloat16") == "bfloat16"
    assert figures.get("tokens", 16) == 16


@pytest.mark.parametrize("code", ["CKP001", "CKP002"])
def test_without_a_checkpoint_they_say_nothing(code: str) -> None:
    assert only(code, new_subject("qwen2")).status == "not-applicable"


@pytest.mark.parametrize(
    ("code", "fault", "reason"),
    [
        ("CKP001", "rope_one_late", "logits differ at step 1"),
        ("CKP001", "write_one_early", "logits differ at step 1"),
        ("CKP001", "position_as_python_int", "traced 16 times, wanted 1"),
        ("CKP002", "generate_takes_the_second_best", "token 0 is"),
        ("CKP002", "generate_skips_a_token", ", wanted "),
    ],
)
def test_red(code: str, fault: str, reason: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    FAULTS[fault](monkeypatch)
    assert reason in red(code, new_subject("qwen2", checkpoint=folder)).reason


def test_a_damaged_checkpoint_is_not_green(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config_of("qwen2")), encoding="utf-8")
    (tmp_path / "model.safetensors").write_bytes(b"nothing")
    assert only("CKP001", new_subject("qwen2", checkpoint=tmp_path)).status in ("fail", "not-run")
