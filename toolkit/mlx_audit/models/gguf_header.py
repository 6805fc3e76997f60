"""The header of a GGUF file, read strictly: nothing is allocated because a length field says so.

`mx.load` trusts its input: a wrong count or offset makes it read outside the file. So every count, length, type and
offset is checked here against the file's size first, and what `mx.load` would misread is refused.
"""

from __future__ import annotations

import os
import stat
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from mlx_audit.models.gguf_format import (
    AGAIN,
    ENCODINGS,
    KEPT_ARRAYS,
    MAX_ALIGNMENT,
    MAX_DIMENSION,
    MAX_HEADER,
    MAX_ITEMS,
    MAX_KEY,
    MAX_STRING,
    MAX_TENSOR_NAME,
    OTHER_ENCODINGS,
    SHOWN_ITEMS,
    Encoding,
    GGUFError,
    Header,
    Items,
    Scalar,
    Tensor,
    Value,
    shorten,
    stamp_of,
)

_NUMBERS = {
    0: ("uint8", "<B"),
    1: ("int8", "<b"),
    2: ("uint16", "<H"),
    3: ("int16", "<h"),
    4: ("uint32", "<I"),
    5: ("int32", "<i"),
    6: ("float32", "<f"),
    10: ("uint64", "<Q"),
    11: ("int64", "<q"),
}
_BOOL, _STRING, _ARRAY, _FLOAT64 = 7, 8, 9, 12


def read_header(path: Path) -> Header:
    """Return the checked header of a GGUF file.

    Raises:
        GGUFError: anything in it is not as the format says, or `mx.load` would misread it.
    """
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise GGUFError("not a regular file", where=str(path), allowed="a GGUF file")
        with path.open("rb") as file:
            return _Parser(file, path).parse()
    except OSError as error:
        raise GGUFError(
            "the file cannot be read", where=str(path), found=error.strerror, fix="check its path and rights"
        ) from error


class _Parser:
    def __init__(self, file: BinaryIO, path: Path) -> None:
        status = os.fstat(file.fileno())
        self._file = file
        self._size = status.st_size
        self._end = min(self._size, MAX_HEADER)
        self._at = 0
        self._header = Header(path, stamp_of(status))

    def parse(self) -> Header:
        header = self._header
        magic = self._take(min(4, self._size), "the magic number")
        if magic != b"GGUF":
            raise self._error("not a GGUF file", 0, found=magic, allowed="GGUF")
        header.version = self._number("<I", "the version")
        if header.version not in (2, 3):
            swapped = int.from_bytes(header.version.to_bytes(4, "little"), "big") in (2, 3)
            raise self._error(
                "big-endian files are not read" if swapped else "unknown version of the format",
                4,
                found=header.version,
                allowed="2 or 3, little-endian",
            )
        tensors = self._count("tensors", smallest=33)
        keys = self._count("metadata keys", smallest=13)
        for _ in range(keys):
            self._entry()
        entries = [self._tensor() for _ in range(tensors)]
        alignment = self._alignment()
        start = -(-self._at // alignment) * alignment
        for name, shape, encoding, offset, size, at in entries:
            if offset % alignment:
                raise self._error(
                    f"the data of tensor {shorten(name)} is misaligned",
                    at,
                    found=offset,
                    allowed=f"a multiple of {alignment}",
                )
            if start + offset + size > self._size:
                raise self._error(
                    f"the data of tensor {shorten(name)} ends outside the file",
                    at,
                    found=f"{size} bytes from {start + offset}",
                    allowed=f"{self._size} bytes in all",
                )
            header.tensors[name] = Tensor(name, shape, encoding, start + offset, size, at)
        self._check_overlap()
        return header

    def _entry(self) -> None:
        at = self._at
        key = self._string("a metadata key", MAX_KEY)
        if not key or key in self._header.values:
            raise self._error(
                "duplicate metadata key" if key else "empty metadata key", at, found=shorten(key)
            )
        kind = self._number("<I", f"the type of {shorten(key)}")
        self._header.places[key] = self._at
        self._header.values[key] = self._value(key, kind)

    def _value(self, key: str, kind: int) -> Value:
        if kind in _NUMBERS:
            return self._number(_NUMBERS[kind][1], shorten(key))
        if kind == _BOOL:
            return self._flag(key)
        if kind == _STRING:
            return self._string(shorten(key), MAX_STRING)
        if kind == _ARRAY:
            return self._array(key)
        raise self._unknown_type(key, kind)

    def _array(self, key: str) -> Items:
        at = self._at
        kind = self._number("<I", f"the item type of {shorten(key)}")
        if kind == _ARRAY:
            raise self._error(f"{shorten(key)} is an array of arrays", at, allowed="numbers, bools, strings")
        if kind in _NUMBERS:
            name, form = _NUMBERS[kind]
        elif kind in (_BOOL, _STRING):
            name, form = {_BOOL: "bool", _STRING: "string"}[kind], ""
        else:
            raise self._unknown_type(key, kind)
        width = struct.calcsize(form) if form else {"bool": 1, "string": 8}[name]
        count = self._count(f"items of {shorten(key)}", smallest=width)
        items: Iterator[Scalar]
        if form:
            data = self._take(count * width, shorten(key))
            items = (item for (item,) in struct.iter_unpack(form, data))
        elif name == "bool":
            items = (self._flag(key) for _ in range(count))
        else:
            items = (self._string(f"an item of {shorten(key)}", MAX_STRING) for _ in range(count))
        kept: list[Scalar] = []
        keep = count if key in KEPT_ARRAYS else SHOWN_ITEMS
        for item in items:
            if len(kept) < keep:
                kept.append(item)
        return Items(name, count, tuple(kept[:SHOWN_ITEMS]), kept if len(kept) == count else None)

    def _tensor(self) -> tuple[str, tuple[int, ...], Encoding, int, int, int]:
        at = self._at
        name = self._string("a tensor's name", MAX_TENSOR_NAME)
        if not name or name in self._header.tensors:
            raise self._error("duplicate tensor name" if name else "empty tensor name", at, found=name)
        rank = self._number("<I", f"the rank of {name}")
        if not 1 <= rank <= 4:
            raise self._error(f"tensor {name} has a wrong rank", at, found=rank, allowed="1 to 4")
        shape = tuple(self._number("<Q", f"a dimension of {name}") for _ in range(rank))
        if not all(1 <= dimension <= MAX_DIMENSION for dimension in shape):
            allowed = f"1 to {MAX_DIMENSION}"
            raise self._error(f"tensor {name} has a wrong dimension", at, found=shape, allowed=allowed)
        kind = self._number("<I", f"the type of {name}")
        offset = self._number("<Q", f"the offset of {name}")
        encoding = ENCODINGS.get(kind)
        if encoding is None:
            raise self._error(
                f"tensor {name} has an encoding that is not read",
                at,
                found=OTHER_ENCODINGS.get(kind, kind),
                allowed=", ".join(known.name for known in ENCODINGS.values()),
                fix="quantize the model to Q4_0, Q4_1 or Q8_0 with llama-quantize --pure",
            )
        if shape[0] % encoding.block:
            raise self._error(
                f"the rows of tensor {name} are no whole blocks of {encoding.name}",
                at,
                found=shape[0],
                allowed=f"a multiple of {encoding.block}",
            )
        size = encoding.size
        for dimension in (shape[0] // encoding.block, *shape[1:]):
            size *= dimension
        self._header.tensors[name] = Tensor(name, shape, encoding, offset, size, at)
        return name, shape, encoding, offset, size, at

    def _alignment(self) -> int:
        key = "general.alignment"
        alignment = self._header.values.get(key, 32)
        if type(alignment) is int and 8 <= alignment <= MAX_ALIGNMENT and alignment & (alignment - 1) == 0:
            return alignment
        allowed = f"a power of two, 8 to {MAX_ALIGNMENT}"
        raise self._header.error("wrong alignment", key, found=alignment, allowed=allowed)

    def _check_overlap(self) -> None:
        before: Tensor | None = None
        for tensor in sorted(self._header.tensors.values(), key=lambda tensor: tensor.offset):
            if before is not None and tensor.offset < before.offset + before.size:
                raise self._error(
                    f"the data of tensors {before.name} and {tensor.name} overlap",
                    tensor.at,
                    found=f"starts at byte {tensor.offset}",
                    allowed=f"from byte {before.offset + before.size}",
                )
            before = tensor

    def _count(self, what: str, smallest: int) -> int:
        at = self._at
        count = self._number("<Q", f"the count of {what}")
        most = min(MAX_ITEMS, (self._end - self._at) // smallest)
        if count > most:
            raise self._error(
                f"more {what} than the file can hold", at, found=count, allowed=f"at most {most}"
            )
        return count

    def _flag(self, key: str) -> bool:
        at = self._at
        byte = self._take(1, shorten(key))[0]
        if byte > 1:
            raise self._error(f"{shorten(key)} is no bool", at, found=byte, allowed="0 or 1")
        return byte == 1

    def _string(self, what: str, most: int) -> str:
        at = self._at
        length = self._number("<Q", f"the length of {what}")
        if length > min(most, self._end - self._at):
            raise self._error(
                f"{what} is too long",
                at,
                found=length,
                allowed=f"at most {min(most, self._end - self._at)} bytes",
            )
        data = self._take(length, what)
        try:
            return data.decode()
        except UnicodeDecodeError as error:
            raise self._error(
                f"{what} is not UTF-8", at + 8 + error.start, found=data[error.start : error.start + 4]
            ) from error

    def _number(self, form: str, what: str) -> int:
        """Return a number; the caller's format says whether it is whole."""
        value: int = struct.unpack(form, self._take(struct.calcsize(form), what))[0]
        return value

    def _take(self, length: int, what: str) -> bytes:
        if length > self._end - self._at:
            whole = self._size <= MAX_HEADER
            raise self._error(
                f"the file ends within {what}" if whole else "the header is too large",
                self._at,
                found=f"{self._end - self._at} bytes" if whole else f"more than {MAX_HEADER} bytes",
                allowed=f"{length} bytes" if whole else f"at most {MAX_HEADER} bytes",
            )
        data = self._file.read(length)
        if len(data) != length:
            raise self._error("the file changed while it was read", self._at)
        self._at += length
        return data

    def _unknown_type(self, key: str, kind: int) -> GGUFError:
        if kind == _FLOAT64:
            return self._error(
                f"{shorten(key)} is a float64, which mx.load misreads",
                self._at,
                allowed="float32",
                fix=f"remove the key {shorten(key)}",
            )
        return self._error(f"{shorten(key)} has an unknown type", self._at, found=kind, allowed="0 to 11")

    def _error(
        self, what: str, at: int, *, found: object = None, allowed: object = None, fix: str = AGAIN
    ) -> GGUFError:
        where = f"{self._header.path}: byte {at}"
        return GGUFError(what, where=where, found=found, allowed=allowed, fix=fix)
