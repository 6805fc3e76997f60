"""Headers of weight files: those that MLX writes are read; those that lie are refused before anything opens them."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlx_audit.convert.safetensors_header import Tensor, WeightsError, read_weights_header


def write(path: Path, header: Any, data: bytes = b"", *, length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return path


def entry(dtype: str = "F32", shape: Any = (2, 3), offsets: Any = (0, 24)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def test_what_mlx_writes_is_read(tmp_path: Path) -> None:
    arrays = {
        "a": mx.zeros((2, 3)),
        "b": mx.zeros((4,), mx.bfloat16),
        "c": mx.zeros((1, 1, 5), mx.uint32),
        "d": mx.array(1.0),
    }
    path = tmp_path / "model.safetensors"
    mx.save_safetensors(str(path), arrays, {"format": "mlx"})
    header = read_weights_header(path)
    assert header.metadata == {"format": "mlx"}
    assert header.tensors == {
        "a": Tensor("F32", (2, 3), 24),
        "b": Tensor("BF16", (4,), 8),
        "c": Tensor("U32", (1, 1, 5), 20),
        "d": Tensor("F32", (), 4),
    }
    assert header.tensors["c"].elements == 5


@pytest.mark.parametrize(
    ("header", "data", "message"),
    [
        ({"a": entry()}, b"\0" * 23, "do not fill the file"),
        ({"a": entry()}, b"\0" * 25, "do not fill the file"),
        ({"a": entry(shape=(2, 4))}, b"\0" * 24, "another number of bytes"),
        ({"a": entry(shape=(1 << 40, 1 << 40))}, b"\0" * 24, "another number of bytes"),
        ({"a": entry(shape=(-2, -3))}, b"\0" * 24, "no usable shape"),
        ({"a": entry(shape=(2.0, 3))}, b"\0" * 24, "no usable shape"),
        ({"a": entry(shape=(True, 6))}, b"\0" * 24, "no usable shape"),
        ({"a": entry(shape=[1] * 20)}, b"\0" * 24, "no usable shape"),
        ({"a": entry(shape="23")}, b"\0" * 24, "no usable shape"),
        ({"a": entry(offsets=(24, 0))}, b"\0" * 24, "no usable data_offsets"),
        ({"a": entry(offsets=(0, 24, 1))}, b"\0" * 24, "no usable data_offsets"),
        ({"a": entry(offsets=(8, 32))}, b"\0" * 32, "overlap, or leave a gap"),
        ({"a": entry(), "b": entry()}, b"\0" * 48, "overlap, or leave a gap"),
        ({"a": entry("F4")}, b"\0" * 24, "unknown dtype"),
        ({"a": entry(["F32"])}, b"\0" * 24, "unknown dtype"),
        ({"a": {**entry(), "more": 1}}, b"\0" * 24, "the entry is not"),
        ({"a": 3}, b"", "the entry is not"),
        ({"__metadata__": {"format": 3}}, b"", "the metadata are no texts"),
        ({"__metadata__": [1]}, b"", "the metadata are no texts"),
        ([], b"", "no JSON object"),
        (b"{'a'}", b"", "no JSON object"),
        (b"\xff\xff", b"", "no JSON object"),
        (b"[" * 100_000, b"", "no JSON object"),
        (b'{"a": 1, "a": 1}', b"", "no JSON object"),
    ],
)
def test_what_lies_is_refused(tmp_path: Path, header: Any, data: bytes, message: str) -> None:
    with pytest.raises(WeightsError, match=message):
        read_weights_header(write(tmp_path / "model.safetensors", header, data))


@pytest.mark.parametrize("length", [0, 1, 3, 1 << 40, (1 << 64) - 1])
def test_lengths_of_headers(tmp_path: Path, length: int) -> None:
    with pytest.raises(WeightsError, match="the header is longer than the file"):
        read_weights_header(write(tmp_path / "model.safetensors", b"{}", length=length))


def test_files_that_are_none(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    with pytest.raises(WeightsError, match="cannot be read"):
        read_weights_header(path)
    path.write_bytes(b"PK\x03")
    with pytest.raises(WeightsError, match="no safetensors file; found: 3 bytes"):
        read_weights_header(path)
