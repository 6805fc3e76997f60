"""A GGUF file's header and the whole mlx-lm configuration that follows from it; MLX is not needed for this."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from typing import Any

from mlx_audit.models.gguf_config import GROUP, Wanted, check_tensors, config_of, wanted_tensors
from mlx_audit.models.gguf_format import Header
from mlx_audit.models.gguf_header import read_header


def read_checked(path: str | os.PathLike[str]) -> tuple[Header, dict[str, Any], dict[str, Wanted]]:
    """Return header, configuration (with `quantization`) and the tensors that the model needs, all consistent.

    Raises:
        GGUFError: see `read_gguf`.
    """
    header = read_header(Path(path))
    config = config_of(header)
    wanted = wanted_tensors(config)
    check_tensors(header, wanted)
    quantization = quantization_of(header, wanted)
    if quantization is not None:
        config["quantization"] = quantization
    return header, config, wanted


def quantization_of(header: Header, wanted: dict[str, Wanted]) -> dict[str, Any] | None:
    """Return mlx-lm's `quantization` entry: the commonest bits, and each module that has others, or none (False)."""
    bits = {
        want.target.removesuffix(".weight"): header.tensors[name].encoding.bits
        for name, want in wanted.items()
        if want.matrix
    }
    quantized = Counter(own for own in bits.values() if own is not None)
    if not quantized:
        return None
    common = quantized.most_common(1)[0][0]
    other = {
        name: {"group_size": GROUP, "bits": own} if own is not None else False
        for name, own in bits.items()
        if own != common
    }
    return {"group_size": GROUP, "bits": common, "mode": "affine", **other}
