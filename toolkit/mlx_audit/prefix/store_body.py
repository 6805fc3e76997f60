"""The body of an entry: one safetensors file, verified before any array of it is used."""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

import mlx.core as mx

from mlx_audit.errors import describe
from mlx_audit.prefix.layers import ArrayForm
from mlx_audit.prefix.reasons import PrefixRefused, Reason
from mlx_audit.prefix.store_files import digest_of, opened, size_of

_DTYPES = {
    "BOOL": "bool_",
    **{
        f"{letter}{bits}": f"{name}{bits}"
        for letter, name in (("U", "uint"), ("I", "int"))
        for bits in (8, 16, 32, 64)
    },
    **{f"F{bits}": f"float{bits}" for bits in (16, 32, 64)},
    "BF16": "bfloat16",
    "C64": "complex64",
}
"""Names of dtypes in safetensors headers, to those of `layers.DTYPES`."""
_MOST_HEADER = 16 << 20


def write_body(path: Path, arrays: Sequence[mx.array]) -> None:
    """Write arrays, named by their place in the sequence."""
    mx.save_safetensors(str(path), {str(index): array for index, array in enumerate(arrays)})


def require_size(path: Path, size: int) -> None:
    """Refuse a body that is missing, or was cut or lengthened; nothing of it is read."""
    with opened(path) as file:
        _require_size(file, path, size)


def verify_body(path: Path, size: int, forms: Sequence[ArrayForm]) -> None:
    """Refuse a body that is not what was written, byte by byte, or holds other arrays than stated."""
    with opened(path) as file:
        _verify(file, path, size, forms)


def read_body(path: Path, size: int, forms: Sequence[ArrayForm]) -> list[mx.array]:
    """Return the evaluated arrays of a body, verified through the very file handle that they are read from.

    Raises:
        PrefixRefused: damaged.
    """
    with opened(path) as file:
        _verify(file, path, size, forms)
        try:
            loaded: Any = mx.load(file, format="safetensors")
            arrays = [loaded[str(index)] for index in range(len(forms))]
            mx.eval(arrays)
        except (RuntimeError, ValueError, KeyError, TypeError) as error:
            raise _damaged(path, "the arrays cannot be read", describe(error)) from error
        return arrays


def _verify(file: BinaryIO, path: Path, size: int, forms: Sequence[ArrayForm]) -> None:
    _require_size(file, path, size)
    found = digest_of(file)
    if found != path.stem:
        raise _damaged(path, "the file is not what was written: its checksum differs", found)
    _require_forms(_header(file, path, size), path, size, forms)
    file.seek(0)


def _require_size(file: BinaryIO, path: Path, size: int) -> None:
    found = size_of(file)
    if found != size:
        raise PrefixRefused(
            Reason.DAMAGED, "the file was cut or lengthened", where=str(path), found=found, allowed=size
        )


def _header(file: BinaryIO, path: Path, size: int) -> tuple[int, dict[str, Any]]:
    """Return where the data of a safetensors file begin, and what its header states of each array."""
    start = file.read(8)
    length = struct.unpack("<Q", start)[0] if len(start) == 8 else -1
    if not 0 < length <= min(size - 8, _MOST_HEADER):
        raise _damaged(path, "no safetensors header", f"{length} bytes")
    try:
        header = json.loads(file.read(length))
    except (ValueError, RecursionError) as error:
        raise _damaged(path, "the safetensors header is not JSON", error) from error
    if not isinstance(header, dict):
        raise _damaged(path, "the safetensors header is no object")
    header.pop("__metadata__", None)
    return 8 + length, header


def _require_forms(
    header: tuple[int, dict[str, Any]], path: Path, size: int, forms: Sequence[ArrayForm]
) -> None:
    """Refuse arrays of other names, forms or places than the manifest states, and bytes between them."""
    data, stated = header
    if set(stated) != {str(index) for index in range(len(forms))}:
        raise _damaged(path, "other arrays than stated", sorted(stated)[:5])
    spans = []
    for index, form in enumerate(forms):
        array = stated[str(index)]
        offsets = array.get("data_offsets") if isinstance(array, dict) else None
        if (
            not isinstance(offsets, list)
            or len(offsets) != 2
            or not all(type(offset) is int for offset in offsets)
            or _DTYPES.get(str(array.get("dtype"))) != form.dtype
            or array.get("shape") != list(form.shape)
            or offsets[1] - offsets[0] != form.nbytes
        ):
            raise _damaged(path, f"array {index} has another form than stated", array)
        spans.append(offsets)
    end = 0
    for first, last in sorted(spans):
        if first != end:
            raise _damaged(path, "the arrays overlap, or leave a gap", first)
        end = last
    if data + end != size:
        raise _damaged(path, "the arrays don't fill the file", data + end)


def _damaged(path: Path, detail: str, found: object = None) -> PrefixRefused:
    return PrefixRefused(
        Reason.DAMAGED, detail, where=str(path), found=found, fix="remove the store and fill it anew"
    )
