"""What `convert` is told to do with the weights: mlx-lm's own options, checked before any work."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict

from mlx_audit.errors import MlxAuditError

Mode = Literal["affine", "mxfp4", "nvfp4", "mxfp8"]
Recipe = Literal["mixed_2_6", "mixed_3_4", "mixed_3_6", "mixed_4_6"]
Dtype = Literal["float32", "bfloat16", "float16"]

_SIZES: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "affine": ((4, 2, 3, 5, 6, 8), (64, 32, 128)),
    "mxfp4": ((4,), (32,)),
    "nvfp4": ((4,), (16,)),
    "mxfp8": ((8,), (32,)),
}
"""Bits and group sizes that MLX has kernels for, the default first."""


class ConvertOptions(BaseModel):
    """Named like the arguments of `mlx_lm.convert`, and passed on to it."""

    model_config = ConfigDict(extra="forbid")

    quantize: bool = False
    q_bits: int | None = None
    q_group_size: int | None = None
    q_mode: Mode = "affine"
    quant_predicate: Recipe | None = None
    dequantize: bool = False
    dtype: Dtype | None = None

    @property
    def changes_weights(self) -> bool:
        """Whether weights are written anew, where they could be copied."""
        return self.quantize or self.dequantize or self.dtype is not None

    @property
    def bits_per_weight(self) -> float:
        """Of a quantized matrix, scales and biases included; at least."""
        bits, groups = _SIZES[self.q_mode]
        per_group = 32 if self.q_mode == "affine" else 8
        return (self.q_bits or bits[0]) + per_group / (self.q_group_size or groups[0])

    def require_sound(self) -> None:
        """Refuse options that contradict each other, or that MLX has no kernels for.

        Raises:
            MlxAuditError: says which.
        """
        if self.quantize and self.dequantize:
            raise MlxAuditError("--quantize and --dequantize do not go together", fix="leave one out")
        others = {
            "--q-bits": self.q_bits,
            "--q-group-size": self.q_group_size,
            "--quant-predicate": self.quant_predicate,
            "--q-mode": None if self.q_mode == "affine" else self.q_mode,
        }
        for option, value in others.items():
            if value is not None and not self.quantize:
                raise MlxAuditError(f"{option} needs --quantize", found=value, fix="add --quantize")
        if self.quant_predicate is not None and (self.q_mode != "affine" or self.q_bits is not None):
            raise MlxAuditError(
                "--quant-predicate chooses the bits, in mode affine",
                fix="leave --q-bits and --q-mode out",
            )
        bits, groups = _SIZES[self.q_mode]
        for option, size, allowed in (
            ("--q-bits", self.q_bits, bits),
            ("--q-group-size", self.q_group_size, groups),
        ):
            if size is not None and size not in allowed:
                raise MlxAuditError(
                    f"--q-mode {self.q_mode} has no such size",
                    where=option,
                    found=size,
                    allowed=", ".join(map(str, sorted(allowed))),
                )
