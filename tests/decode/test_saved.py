"""Saved sessions: an exact round trip, and nothing hostile in a file gets further than SavedSessionInvalid."""

from __future__ import annotations

import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_audit.decode import CompiledDecodeSession
from mlx_audit.errors import SavedSessionInvalid, SessionMisuse
from saved_files import changed_session_header, load, put_together, taken_apart
from tiny_models import distance, raw, shared_model, state_bytes, tiny_model, tokens


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    session = CompiledDecodeSession(shared_model(), 9, evidence="ignore")
    session.prefill([tokens(4)])
    session.step([1])
    session.save(tmp_path / "session.safetensors")
    return tmp_path / "session.safetensors"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_round_trip_is_exact_and_independent(tmp_path: Path, dtype: str) -> None:
    model = tiny_model(dtype=dtype)
    session = CompiledDecodeSession(model, 12, batch_size=2, evidence="ignore")
    session.prefill([tokens(4, seed=1), tokens(4, seed=2)])
    session.step([1, 2])
    session.save(str(tmp_path / "a.safetensors"))
    loaded = load(tmp_path / "a.safetensors", model)
    assert (loaded.position, loaded.capacity, loaded.batch_size, loaded.remaining) == (5, 12, 2, 7)
    assert state_bytes(loaded) == state_bytes(session)
    for token in tokens(5, seed=3):
        assert distance(loaded.step([token, 7]), session.step([token, 7])) == 0.0
    assert loaded.trim(6) == 6
    assert (session.position, loaded.position) == (10, 4)


def test_a_loaded_session_no_longer_needs_its_file(saved: Path) -> None:
    loaded, wanted = load(saved), load(saved).step([3])
    saved.write_bytes(b"")  # the same inode: a lazily read array would now be garbage
    assert distance(loaded.step([3]), wanted) == 0.0


def test_a_session_may_be_saved_over_the_file_that_it_came_from(saved: Path) -> None:
    loaded = load(saved)
    loaded.save(saved)
    assert distance(load(saved).step([3]), loaded.step([3])) == 0.0


def test_nothing_to_save_before_a_prefill(tmp_path: Path) -> None:
    with pytest.raises(SessionMisuse):
        CompiledDecodeSession(shared_model(), 9, evidence="ignore").save(tmp_path / "x")
    assert list(tmp_path.iterdir()) == []


def test_a_killed_save_leaves_the_old_file(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = saved.read_bytes()
    session = load(saved)
    session.step([2])
    real = mx.save_safetensors

    def killed(name: str, *rest: Any) -> None:
        real(name, *rest)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(mx, "save_safetensors", killed)
        with pytest.raises(KeyboardInterrupt):
            session.save(saved)
    assert saved.read_bytes() == before
    assert [path.name for path in saved.parent.iterdir()] == [saved.name]
    session.save(saved)
    assert load(saved).position == 6


def test_every_truncation_is_refused(saved: Path) -> None:
    content = saved.read_bytes()
    for size in {0, 1, 7, 8, 9, 100, len(content) // 2, len(content) - 1}:
        saved.write_bytes(content[:size])
        with pytest.raises(SavedSessionInvalid):
            load(saved)
    saved.write_bytes(content + b"x")
    with pytest.raises(SavedSessionInvalid):
        load(saved)


def test_random_damage_is_refused_or_harmless(saved: Path) -> None:
    """Bytes of the header, not of the data: those are numbers, which have no check."""
    content = saved.read_bytes()
    header = 8 + struct.unpack("<Q", content[:8])[0]
    random = np.random.default_rng(0)
    for _ in range(150):
        damaged = bytearray(content)
        for place in random.integers(0, header, random.integers(1, 4)):
            damaged[place] = random.integers(256)
        saved.write_bytes(bytes(damaged))
        try:
            session = load(saved)
        except SavedSessionInvalid:
            continue
        session.step([1])


@pytest.mark.parametrize("size", [2**64 - 1, 2**63, 2**40, 10**8 + 1, 2**31])
def test_huge_header_lengths(saved: Path, size: int) -> None:
    saved.write_bytes(struct.pack("<Q", size) + saved.read_bytes()[8:])
    with pytest.raises(SavedSessionInvalid, match="not a readable safetensors file"):
        load(saved)


def _no_metadata(path: Path) -> None:
    header, data = taken_apart(path)
    del header["__metadata__"]
    put_together(path, header, data)


def _renamed_array(path: Path) -> None:
    header, data = taken_apart(path)
    header["9.0"] = header.pop("0.0")
    put_together(path, header, data)


def _further_array(path: Path) -> None:
    header, data = taken_apart(path)
    header["extra"] = {"dtype": "U8", "shape": [4], "data_offsets": [len(data), len(data) + 4]}
    put_together(path, header, data + b"1234")


def _overlapping(path: Path) -> None:
    header, data = taken_apart(path)
    header["0.0"]["data_offsets"] = header["1.0"]["data_offsets"]
    put_together(path, header, data)


def _outside(path: Path) -> None:
    header, data = taken_apart(path)
    header["0.0"]["data_offsets"] = [len(data), len(data) + 2304]
    put_together(path, header, data)


def _other_dtype(path: Path) -> None:
    header, data = taken_apart(path)
    header["0.0"]["dtype"] = "I32"
    put_together(path, header, data)


def _positions(value: int) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        header, data = taken_apart(path)
        content = bytearray(data)
        for index in range(4):
            start, end = header[f"{index}.2"]["data_offsets"]
            content[start:end] = struct.pack("<i", value)
        put_together(path, header, bytes(content))

    return change


def _poisoned(path: Path) -> None:
    header, data = taken_apart(path)
    content = bytearray(data)
    _, end = header["1.1"]["data_offsets"]
    content[end - 4 : end] = struct.pack("<f", float("nan"))
    put_together(path, header, bytes(content))


def _header(**changes: Any) -> Callable[[Path], None]:
    return lambda path: changed_session_header(path, **changes)


HOSTILE: dict[str, Callable[[Path], None]] = {
    "empty": lambda path: path.write_bytes(b"") and None,
    "text": lambda path: path.write_text("hello world, this is no safetensors file") and None,
    "numpy": lambda path: path.write_bytes(b"\x93NUMPY" + bytes(200)) and None,
    "gguf": lambda path: path.write_bytes(b"GGUF" + bytes(200)) and None,
    "zip": lambda path: path.write_bytes(b"PK\x03\x04" + bytes(200)) and None,
    "no metadata": _no_metadata,
    "header is a list": lambda path: put_together(path, [], b""),
    "header nests deeply": lambda path: put_together(path, b"[" * 200_000, b""),
    "other version": _header(format="mlx-audit/session/2"),
    "no version": _header(format=None),
    "capacity 0": _header(capacity=0),
    "capacity smaller": _header(capacity=4),
    "capacity larger": _header(capacity=10),
    "capacity huge": _header(capacity=2**31 - 1),
    "capacity beyond": _header(capacity=2**80),
    "capacity negative": _header(capacity=-9),
    "capacity text": _header(capacity="9"),
    "capacity bool": _header(capacity=True),
    "capacity float": _header(capacity=9.0),
    "batch 0": _header(batch_size=0),
    "batch 2": _header(batch_size=2),
    "batch huge": _header(batch_size=2**31 - 1),
    "position smaller": _header(position=4),
    "position larger": _header(position=6),
    "position beyond capacity": _header(position=10),
    "position negative": _header(position=-1),
    "position null": _header(position=None),
    "kinds fewer": _header(kinds=["linear"]),
    "kinds other": _header(kinds=["rotating"] * 4),
    "kinds text": _header(kinds="linear"),
    "kinds nested": _header(kinds=[["linear"]] * 4),
    "module other": _header(module="mlx_lm.models.qwen2"),
    "module null": _header(module=None),
    "array renamed": _renamed_array,
    "array too many": _further_array,
    "arrays overlap": _overlapping,
    "array outside": _outside,
    "array dtype": _other_dtype,
    "positions at capacity": _positions(9),
    "positions beyond": _positions(1000),
    "positions negative": _positions(-1),
    "NaN in an unwritten slot": _poisoned,
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_files(saved: Path, name: str) -> None:
    HOSTILE[name](saved)
    with pytest.raises(SavedSessionInvalid) as caught:
        load(saved)
    assert str(saved) in str(caught.value)
    assert caught.value.fix


def test_session_header_that_is_no_json_object(saved: Path) -> None:
    header, data = taken_apart(saved)
    for text in ("", "{", "[]", "null", "7", "[" * 100_000, "\ud800", "x" * (1 << 21)):
        header["__metadata__"]["mlx_audit"] = text
        put_together(saved, header, data)
        with pytest.raises(SavedSessionInvalid):
            load(saved)


def test_another_models_session_is_refused(saved: Path) -> None:
    for other in (
        shared_model("qwen2"),
        tiny_model(num_hidden_layers=3),
        tiny_model(num_key_value_heads=4),
        tiny_model(head_dim=16),
        tiny_model(dtype="bfloat16"),
    ):
        with pytest.raises(SavedSessionInvalid, match="does not fit the model"):
            load(saved, other)


def test_bfloat16_file_for_a_float32_model(tmp_path: Path) -> None:
    session = CompiledDecodeSession(tiny_model(dtype="bfloat16"), 9, evidence="ignore")
    session.prefill([tokens(4)])
    session.save(tmp_path / "a")
    with pytest.raises(SavedSessionInvalid, match="bfloat16"):
        load(tmp_path / "a")


@pytest.mark.parametrize("what", ["missing", "folder", "pipe"])
def test_no_regular_file(tmp_path: Path, what: str) -> None:
    path = tmp_path / "x"
    if what == "folder":
        path.mkdir()
    if what == "pipe":
        os.mkfifo(path)
    with pytest.raises(SavedSessionInvalid, match="no such file"):
        load(path)


def test_loading_leaves_the_file_as_it_was(saved: Path) -> None:
    before = saved.read_bytes()
    session = load(saved)
    session.step([1])
    assert raw(session.state[0][2]) == struct.pack("<i", 6)
    assert saved.read_bytes() == before
