"""A checkpoint with its real weights and its tokenizer: an MLX folder, or a GGUF file."""

from __future__ import annotations

import os
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mlx.nn as nn

from mlx_audit.errors import TargetError
from mlx_audit.manifests import load_configuration
from mlx_audit.models.gguf import GGUFCheckpoint, read_gguf
from mlx_audit.models.origins import remember
from mlx_audit.models.target import resolve_target

if TYPE_CHECKING:
    from mlx_lm.tokenizer_utils import TokenizerWrapper

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")


class Checkpoint:
    """Model and tokenizer of a checkpoint, each loaded when first asked for; no code of the checkpoint's is run.

    Args:
        path: A folder, or a GGUF file.
        dtype: What a GGUF file's scales, norms and activations are in; a folder's weights stay as they are stored.
    """

    def __init__(self, path: Path, *, dtype: str = "float32") -> None:
        self.path = path
        self._dtype = dtype

    @cached_property
    def model(self) -> nn.Module:
        """The model with its weights; one from a folder is remembered as such."""
        if self._gguf is not None:
            return self._gguf.load_model(dtype=self._dtype)
        from mlx_lm.utils import load_model

        model: nn.Module = load_model(self.path)[0]
        remember(model, self.path)
        return model

    @cached_property
    def tokenizer(self) -> TokenizerWrapper | None:
        """mlx-lm's tokenizer, or None where the folder has none.

        Raises:
            TargetError: the files are there, and cannot be used.
        """
        if self._gguf is not None:
            return self._gguf.load_tokenizer()
        if not any((self.path / name).is_file() for name in _TOKENIZER_FILES):
            return None
        from mlx_lm.utils import load_tokenizer

        stop = load_configuration(self.path / "config.json").get("eos_token_id")
        try:
            tokenizer: TokenizerWrapper = load_tokenizer(
                self.path, {"trust_remote_code": False}, eos_token_ids=_ids(stop)
            )
        except Exception as error:
            raise TargetError(
                "the tokenizer cannot be loaded",
                where=str(self.path),
                found=f"{type(error).__name__}: {error}",
            ) from error
        return tokenizer

    @cached_property
    def _gguf(self) -> GGUFCheckpoint | None:
        return read_gguf(self.path) if self.path.is_file() else None


def load(path: str | os.PathLike[str]) -> tuple[nn.Module, TokenizerWrapper | None]:
    """Return model and tokenizer of a checkpoint, as `mlx_lm.load` does, with more said of what cannot be used.

    A session over the model warns (`StaleStamp`) when the folder bears a stamp that no longer matches. No code of the
    checkpoint's is run.

    Args:
        path: An MLX folder or a GGUF file. The tokenizer is None where a folder has none.

    Raises:
        TargetError: it is no usable checkpoint.
    """
    # Absolute, so that a folder named like a family is a folder.
    target = resolve_target(str(Path(path).absolute()))
    if target.folder is None:
        raise TargetError("this is no checkpoint", where=str(path), allowed="an MLX folder, or a .gguf file")
    checkpoint = Checkpoint(target.folder)
    return checkpoint.model, checkpoint.tokenizer


def chat_ids(tokenizer: TokenizerWrapper, messages: list[dict[str, str]]) -> list[int]:
    """Return the ids of a conversation that the model shall continue: by the chat template, where there is one."""
    if tokenizer.has_chat_template:
        return list(tokenizer.apply_chat_template(messages, add_generation_prompt=True))
    return text_ids(tokenizer, "\n".join(message["content"] for message in messages))


def text_ids(tokenizer: TokenizerWrapper, text: str) -> list[int]:
    """Return the ids of a text, special tokens added as mlx-lm's `generate` adds them."""
    begins = tokenizer.bos_token is not None and text.startswith(tokenizer.bos_token)
    return list(tokenizer.encode(text, add_special_tokens=not begins))


def text_of(tokenizer: TokenizerWrapper, tokens: list[int]) -> str:
    """Return what tokens say, by mlx-lm's streaming detokenizer."""
    detokenizer: Any = tokenizer.detokenizer
    for token in tokens:
        detokenizer.add_token(token)
    detokenizer.finalize()
    return str(detokenizer.text)


def _ids(value: Any) -> list[int] | None:
    if value is None:
        return None
    return list(value) if isinstance(value, list) else [value]
