"""Checkpoints in GGUF files: the llama and qwen2 architectures, as mlx-lm models and tokenizers.

The header is checked before MLX opens the file (`gguf_header`); from then on, configuration, quantization and tokenizer
all come from the file's own metadata.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import mlx.core as mx
import mlx.nn as nn

from mlx_audit.errors import TargetError
from mlx_audit.models.build import DTYPES, resolve_arguments
from mlx_audit.models.gguf_checked import read_checked
from mlx_audit.models.gguf_config import GROUP, Wanted
from mlx_audit.models.gguf_format import GGUFError, Header, Items, shorten, stamp_of
from mlx_audit.models.gguf_tokenizer import Vocabulary, checked_tokenizer, read_vocabulary
from mlx_audit.models.modules import import_model

if TYPE_CHECKING:
    from mlx_lm.tokenizer_utils import TokenizerWrapper

__all__ = ["GGUFCheckpoint", "GGUFError", "read_gguf"]


def read_gguf(path: str | os.PathLike[str]) -> GGUFCheckpoint:
    """Return a checked GGUF file; its weights are not read yet.

    Raises:
        GGUFError: the file is malformed, contradicts itself, or holds what mlx-lm's model cannot express.
    """
    header, config, wanted = read_checked(path)
    return GGUFCheckpoint(header, config, wanted, read_vocabulary(header))


@dataclass(frozen=True)
class GGUFCheckpoint:
    """A GGUF file whose header holds together.

    Attributes:
        header: What it says, with the place of each statement.
        config: mlx-lm's `config.json`, with the bits of every quantized module.
        wanted: The model's parameters, by name in the file.
        vocabulary: The tokenizer's metadata.
    """

    header: Header
    config: dict[str, Any]
    wanted: Mapping[str, Wanted]
    vocabulary: Vocabulary

    @property
    def path(self) -> Path:
        """The file."""
        return self.header.path

    @property
    def architecture(self) -> str:
        """`llama` or `qwen2`: the name of mlx-lm's module, too."""
        return str(self.config["model_type"])

    @cached_property
    def metadata(self) -> dict[str, Any]:
        """The metadata as plain values; of a long array, its type, its count and the first items."""
        return {key: _plain(value) for key, value in self.header.values.items()}

    def load_model(self, lazy: bool = False, *, dtype: str = "float32") -> nn.Module:
        """Return mlx-lm's model with the weights of the file.

        Args:
            lazy: Leave the conversion of the weights to the first use.
            dtype: What scales, norms and activations are in. float32 holds every number of the file; float16 is faster
                on GPUs, and many times slower on CPUs.

        Raises:
            GGUFError: the file has changed since its header was read, or MLX cannot read it.
            TargetError: the dtype is not known.
        """
        if dtype not in DTYPES:
            raise TargetError("unknown dtype", found=dtype, allowed=", ".join(DTYPES))
        module = import_model(f"mlx_lm.models.{self.architecture}")
        model: nn.Module = module.Model(resolve_arguments(module, self.config))
        weights = self.load_weights(dtype=dtype)
        quantization = self.config.get("quantization")
        if quantization is not None:
            common = {"group_size": quantization["group_size"], "bits": quantization["bits"]}
            nn.quantize(
                model,
                **common,
                class_predicate=lambda name, _: (
                    quantization.get(name, common) if f"{name}.scales" in weights else False
                ),
            )
        model.load_weights(list(weights.items()))
        model.eval()
        if not lazy:
            mx.eval(model.parameters())
        return model

    def load_weights(self, *, dtype: str = "float32") -> dict[str, mx.array]:
        """Return the weights under mlx-lm's names; packed ones stay packed, all others are in `dtype`.

        Raises:
            GGUFError: see `load_model`.
        """
        arrays = self._arrays()
        weights: dict[str, mx.array] = {}
        for name, want in self.wanted.items():
            parts = {want.target: name}
            bits = self.header.tensors[name].encoding.bits
            if bits is not None:
                prefix, target = name.removesuffix(".weight"), want.target.removesuffix(".weight")
                parts |= {f"{target}.{part}": f"{prefix}.{part}" for part in ("scales", "biases")}
            for target, source in parts.items():
                array = arrays.pop(source, None)
                shape = _shape_of(want, bits, target)
                if array is None or array.shape != shape:
                    raise self.header.error(
                        "MLX reads this tensor otherwise",
                        name,
                        found=None if array is None else array.shape,
                        allowed=shape,
                        fix="install mlx 0.32.4",
                    )
                weights[target] = array if array.dtype == mx.uint32 else array.astype(DTYPES[dtype])
        return weights

    def load_tokenizer(self) -> TokenizerWrapper:
        """Return mlx-lm's wrapper around the file's tokenizer: chat template, stop tokens, streaming.

        Raises:
            GGUFError: the libraries refuse what the metadata say.
        """
        tokenizer: TokenizerWrapper = checked_tokenizer(self.header, self.vocabulary)
        return tokenizer

    def _arrays(self) -> dict[str, mx.array]:
        try:
            if stamp_of(self.path.stat()) != self.header.stamp:
                raise GGUFError("the file changed since its header was read", where=str(self.path))
            with _writable(self.path) as path:
                arrays = cast("dict[str, mx.array]", mx.load(str(path), format="gguf"))
        except GGUFError:
            raise
        except Exception as error:
            raise GGUFError(
                "MLX cannot read the file",
                where=str(self.path),
                found=shorten(f"{type(error).__name__}: {error}"),
            ) from error
        return arrays


@contextlib.contextmanager
def _writable(path: Path) -> Iterator[Path]:
    """Give the path, or a copy where it may not be written: MLX opens GGUF files for writing even to read them."""
    if os.access(path, os.W_OK):
        yield path
        return
    with tempfile.TemporaryDirectory(prefix="mlx-audit-") as folder:
        copy = Path(folder, "copy.gguf")
        shutil.copyfile(path, copy)
        yield copy


def _shape_of(want: Wanted, bits: int | None, target: str) -> tuple[int, ...]:
    width, *rest = want.shape
    if bits is not None:
        width = width * bits // 32 if target.endswith(".weight") else width // GROUP
    return (*reversed(rest), width)


def _plain(value: Any) -> Any:
    if not isinstance(value, Items):
        return value
    if value.count == len(value.first):
        return list(value.first)
    return {"type": value.kind, "count": value.count, "first": list(value.first)}
