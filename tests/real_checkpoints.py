"""Tiny checkpoints with weights of their own: an MLX folder without a tokenizer, and a GGUF file with one."""

from __future__ import annotations

import json
import os
from pathlib import Path

import mlx.core as mx
from mlx.utils import tree_flatten

import gguf_files
from tiny_models import config_of, tiny_model


def write_folder(folder: Path, family: str = "qwen2") -> Path:
    """Save a tiny model as mlx-lm does."""
    weights = dict(tree_flatten(tiny_model(family).parameters()))
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})
    (folder / "config.json").write_text(json.dumps(config_of(family)), encoding="utf-8")
    return folder


def write_gguf(path: Path, family: str = "qwen2", kinds: dict[str, int] | None = None) -> Path:
    """Save a tiny model with a byte-level tokenizer and a chat template, as llama.cpp's converter would."""
    model = tiny_model(family, vocab_size=gguf_files.VOCABULARY)
    path.write_bytes(gguf_files.draft_of(model, kinds).build())
    return path


def flip(path: Path, at: int) -> None:
    """Change one bit of a file, and put size and time of modification back."""
    before = path.stat()
    with path.open("r+b") as file:
        file.seek(at)
        (byte,) = file.read(1)
        file.seek(at)
        file.write(bytes([byte ^ 1]))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (path.stat().st_size, path.stat().st_mtime_ns) == (before.st_size, before.st_mtime_ns)
