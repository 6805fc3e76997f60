"""Tiny folders as Hugging Face publishes them: safetensors, a byte-level tokenizer, a chat template, a model card."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from gguf_files import MERGES, SPECIAL, TEMPLATE, byte_tokens
from tiny_models import config_of, tiny_model

VOCABULARY = len(SPECIAL) + 256 + len(MERGES)
SIZES = {"hidden_size": 64, "intermediate_size": 64, "vocab_size": VOCABULARY}
CARD = "---\nlicense: mit\ntags:\n- tiny\n---\n\n# A tiny model\n\nIt says nothing.\n"


def tokenizer() -> Tokenizer:
    """Return a byte-level tokenizer with three special tokens."""
    tokens = [*SPECIAL, *byte_tokens(), *(merge.replace(" ", "") for merge in MERGES)]
    pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in MERGES)]
    made = Tokenizer(models.BPE({token: at for at, token in enumerate(tokens)}, pairs))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    return made


def write_hf(folder: Path, family: str = "qwen2", *, form: str = "pt", **changes: Any) -> Path:
    """Write a folder that mlx-lm can convert, with a weight file that says `format: pt`, or another one."""
    folder.mkdir(parents=True, exist_ok=True)
    model = tiny_model(family, **{**SIZES, **changes})
    weights = dict(tree_flatten(model.parameters()))
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": form})
    config = config_of(family, **{**SIZES, **changes, "torch_dtype": "float32", "eos_token_id": 2})
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    tokenizer().save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "chat_template": TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    (folder / "README.md").write_text(CARD, encoding="utf-8")
    return folder
