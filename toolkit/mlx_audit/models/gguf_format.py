"""The GGUF format as data: limits, encodings of tensors, and what a header holds."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

from mlx_audit.errors import TargetError

MAX_HEADER = 128 << 20
"""Bytes; the largest vocabularies in use (262,144 tokens) need less than a tenth."""
MAX_STRING = 1 << 20
MAX_ITEMS = 1 << 20
MAX_KEY = 65_535
MAX_TENSOR_NAME = 64
MAX_DIMENSION = (1 << 31) - 1
MAX_ALIGNMENT = 1 << 16
SHOWN_ITEMS = 8

KEPT_ARRAYS = frozenset(f"tokenizer.ggml.{name}" for name in ("tokens", "merges", "scores", "token_type"))
"""Arrays that are kept whole; of others, only the count and the first items."""

AGAIN = "download the file again, or convert the model again with a current llama.cpp"


class GGUFError(TargetError):
    """A GGUF file is malformed, contradicts itself, or holds what this reader does not build."""


@dataclass(frozen=True)
class Encoding:
    """How the numbers of a tensor are stored.

    Attributes:
        name: llama.cpp's name.
        block: Numbers to a block.
        size: Bytes to a block.
        bits: What MLX keeps it in: 4 or 8 bits in groups of 32, or None where MLX makes it floats.
    """

    name: str
    block: int
    size: int
    bits: int | None = None


ENCODINGS = {
    0: Encoding("F32", 1, 4),
    1: Encoding("F16", 1, 2),
    2: Encoding("Q4_0", 32, 18, bits=4),
    3: Encoding("Q4_1", 32, 20, bits=4),
    8: Encoding("Q8_0", 32, 34, bits=8),
    14: Encoding("Q6_K", 256, 210),
}
OTHER_ENCODINGS = {
    6: "Q5_0",
    7: "Q5_1",
    10: "Q2_K",
    11: "Q3_K",
    12: "Q4_K",
    13: "Q5_K",
    15: "Q8_K",
    30: "BF16",
}
"""Names of encodings that are refused; of rarer ones, an error shows the number.

MLX squeezes BF16 into float16, whose range is smaller, and MLX 0.32.4 decodes Q4_K to other numbers than llama.cpp.
"""


@dataclass(frozen=True)
class Tensor:
    """A tensor's entry in the header.

    Attributes:
        name: Its name in the file.
        shape: Its dimensions in ggml's order, the contiguous one first.
        encoding: How its numbers are stored.
        offset: Where its data starts in the file.
        size: Bytes of its data.
        at: Where its entry starts in the file.
    """

    name: str
    shape: tuple[int, ...]
    encoding: Encoding
    offset: int
    size: int
    at: int


@dataclass(frozen=True)
class Items:
    """An array of the metadata.

    Attributes:
        kind: Type of an item.
        count: How many there are.
        first: The first few.
        values: All of them, or None where they are not kept.
    """

    kind: str
    count: int
    first: tuple[Scalar, ...]
    values: list[Scalar] | None


Scalar = str | int | float | bool
Value = Scalar | Items


@dataclass
class Header:
    """What a GGUF file says about itself.

    Attributes:
        path: The file.
        stamp: Identity, size and time of the file that was read.
        version: Of the format.
        values: Metadata by key.
        places: Byte offset of each value.
        tensors: Entries by name.
    """

    path: Path
    stamp: tuple[int, ...]
    version: int = 0
    values: dict[str, Value] = field(default_factory=dict)
    places: dict[str, int] = field(default_factory=dict)
    tensors: dict[str, Tensor] = field(default_factory=dict)

    def error(
        self, what: str, key: str, *, found: object = None, allowed: object = None, fix: str = AGAIN
    ) -> GGUFError:
        """Return an error about a metadata key or a tensor; its place is looked up."""
        at = self.places.get(key)
        if at is None and key in self.tensors:
            at = self.tensors[key].at
        place = "" if at is None else f", byte {at}"
        return GGUFError(
            what, where=f"{self.path}: {shorten(key)}{place}", found=found, allowed=allowed, fix=fix
        )


def stamp_of(status: os.stat_result) -> tuple[int, ...]:
    """Return what changes when a file is replaced or written to."""
    return (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)


def shorten(text: str) -> str:
    """Return text that fits an error message."""
    return text if len(text) <= 80 else f"{text[:77]}…"
