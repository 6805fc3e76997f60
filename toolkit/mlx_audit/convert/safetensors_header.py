"""The header of a safetensors file, checked against the file before any library opens it."""

from __future__ import annotations

import json
import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlx_audit.errors import MlxAuditError

_MOST_HEADER = 100_000_000
"""Bytes; what the format allows."""
_MOST_DIMENSIONS = 16
_MOST_VALUES = 1_000_000
"""Of its JSON: 100 MB can hold so many empty objects that they take gigabytes."""

_ITEM_BYTES = {
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 8),
    **dict.fromkeys(("F32", "I32", "U32"), 4),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 2),
    **dict.fromkeys(("I8", "U8", "BOOL", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 1),
}


class WeightsError(MlxAuditError):
    """A weight file is damaged, or says of itself what is not so."""


@dataclass(frozen=True)
class Tensor:
    """What a header says of one tensor, and is so."""

    dtype: str
    shape: tuple[int, ...]
    bytes: int

    @property
    def elements(self) -> int:
        """How many numbers it holds."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class Header:
    """A header that fits its file: the tensors lie one after the other and fill it.

    Attributes:
        metadata: Texts by key; MLX writes `format: mlx`.
        tensors: By name.
    """

    metadata: dict[str, str]
    tensors: dict[str, Tensor]


def read_weights_header(path: Path) -> Header:
    """Return the checked header of a safetensors file.

    Raises:
        WeightsError: it cannot be read, is no such file, or does not fit the file.
    """

    def wrong(what: str, name: str = "", found: object = None, allowed: object = None) -> WeightsError:
        where = f"{path}: {name}" if name else str(path)
        return WeightsError(what, where=where, found=found, allowed=allowed, fix="get the file again")

    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            begin = file.read(8)
            if len(begin) < 8:
                raise wrong("no safetensors file", found=f"{len(begin)} bytes")
            (length,) = struct.unpack("<Q", begin)
            if not 2 <= length <= min(_MOST_HEADER, size - 8):
                raise wrong("the header is longer than the file, or than allowed", found=length)
            text = file.read(length)
    except OSError as error:
        raise wrong("the file cannot be read", found=error.strerror) from error
    if (values := sum(map(text.count, (b",", b"[", b"{")))) > _MOST_VALUES:
        raise wrong("the header holds too many values", found=values, allowed=f"at most {_MOST_VALUES}")
    try:
        stated = json.loads(text, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise wrong("the header is no JSON object", found=error) from error
    if not isinstance(stated, dict):
        raise wrong("the header is no JSON object", found=type(stated).__name__)
    metadata = stated.pop("__metadata__", None) or {}  # MLX writes null where it has none
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise wrong("the metadata are no texts", "__metadata__")
    tensors, spans = {}, []
    for name, entry in stated.items():
        what = _mistake(entry)
        if what:
            raise wrong(what, name, entry)
        tensors[name] = Tensor(entry["dtype"], tuple(entry["shape"]), _bytes(entry))
        spans.append((*entry["data_offsets"], name))
    end = 0
    for start, stop, name in sorted(spans):
        if start != end:
            raise wrong("the tensors overlap, or leave a gap", name, [start, stop], f"a start at {end}")
        end = stop
    if end != size - 8 - length:
        raise wrong("the tensors do not fill the file", found=f"{size - 8 - length} bytes", allowed=end)
    return Header(metadata, tensors)


def _mistake(entry: Any) -> str | None:
    """Return what is wrong with a tensor's entry, or None."""
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        return "the entry is not dtype, shape and data_offsets"
    if not isinstance(entry["dtype"], str) or entry["dtype"] not in _ITEM_BYTES:
        return "unknown dtype"
    shape, offsets = entry["shape"], entry["data_offsets"]
    if not _are_counts(shape) or len(shape) > _MOST_DIMENSIONS:
        return "no usable shape"
    if not _are_counts(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        return "no usable data_offsets"
    if offsets[1] - offsets[0] != _bytes(entry):
        return "shape and dtype take another number of bytes than data_offsets"
    return None


def _are_counts(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int and 0 <= item < 1 << 62 for item in value)


def _bytes(entry: dict[str, Any]) -> int:
    shape: list[int] = entry["shape"]
    return math.prod(shape) * _ITEM_BYTES[entry["dtype"]]


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key is there twice")
    return found
