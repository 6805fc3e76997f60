"""In the child: folders, by mlx-lm's own converter; and whether mlx-lm can load what came out."""

from __future__ import annotations

from pathlib import Path

from mlx_lm.convert import convert
from mlx_lm.utils import load_model

from mlx_audit.convert.order import Order
from mlx_audit.convert.safetensors_header import read_weights_header
from mlx_audit.evidence.stamps import WEIGHTS
from mlx_audit.models.checkpoint import Checkpoint


def convert_folder(order: Order) -> None:
    """Convert a folder that holds nothing but files of a model; no code of its own is run."""
    options = order.options
    convert(
        hf_path=str(order.source),
        mlx_path=str(order.made),
        quantize=options.quantize,
        q_group_size=options.q_group_size or (64 if options.quant_predicate else None),
        q_bits=options.q_bits,
        q_mode=options.q_mode,
        dtype=options.dtype,
        dequantize=options.dequantize,
        quant_predicate=options.quant_predicate,
        trust_remote_code=False,
    )


def require_loads(folder: Path) -> None:
    """Raise what stands in the way, where mlx-lm cannot load a folder; the weights are not read.

    Files that were cut short, as by a full disk, are found too.
    """
    for path in sorted(folder.glob(WEIGHTS)):
        read_weights_header(path)
    load_model(folder, lazy=True)
    _ = Checkpoint(folder).tokenizer
