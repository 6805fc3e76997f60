"""Saved sessions over caches of every kind: exact round trips, and positions that cannot be are refused."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import pytest
from mlx_lm.models.cache import RotatingKVCache

from mlx_audit.decode import CompiledDecodeSession
from mlx_audit.errors import SavedSessionInvalid
from saved_files import changed_session_header, load, put_together, taken_apart
from tiny_models import distance, state_bytes, tiny_model, tokens
from zoo_models import zoo_model

OTHERS = ("llama", "qwen3_next", "gemma3n")
"""Families with rings, with recurrences, and with shared caches."""


@pytest.mark.parametrize("family", OTHERS)
@pytest.mark.parametrize("ragged", [False, True])
def test_sessions_of_every_kind_go_on_as_if_never_saved(tmp_path: Path, family: str, ragged: bool) -> None:
    model, rows = zoo_model(family), [tokens(9, seed=1), tokens(9, seed=2)]
    session = CompiledDecodeSession(model, 16, 2, evidence="ignore")
    session.prefill(rows, lengths=[3, 9] if ragged else None)
    session.step([1, 2])
    session.save(tmp_path / "a")
    loaded = load(tmp_path / "a", model)
    assert (loaded.position, state_bytes(loaded)) == (10, state_bytes(session))
    for token in tokens(3, seed=3):
        assert distance(loaded.step([token, 7]), session.step([token, 7])) == 0.0


def changed_array(path: Path, name: str, *values: int) -> None:
    """Write other integers into one array."""
    header, data = taken_apart(path)
    start, end = header[name]["data_offsets"]
    content = struct.pack(f"<{len(values)}i", *values)
    assert end - start == len(content)
    put_together(path, header, data[:start] + content + data[end:])


@pytest.mark.parametrize("values", [(4, 10), (-1, 9), (2**31 - 1, 9), (0, 11), (-(2**31), 9)])
@pytest.mark.parametrize("cache", [0, 1])
def test_positions_of_rows_ahead_of_the_time_or_below_zero(
    tmp_path: Path, cache: int, values: tuple[int, int]
) -> None:
    """Cache 0 is a ring, cache 1 a plain one; the batch stands at time 9."""
    model = zoo_model("llama")
    session = CompiledDecodeSession(model, 16, 2, evidence="ignore")
    session.prefill([tokens(9)] * 2, lengths=[3, 9])
    session.save(tmp_path / "a")
    changed_array(tmp_path / "a", f"{cache}.2", 2, 9)
    assert load(tmp_path / "a", model).position == 9
    changed_array(tmp_path / "a", f"{cache}.2", *values)
    with pytest.raises(SavedSessionInvalid, match=f"position of cache {cache}"):
        load(tmp_path / "a", model)


@pytest.mark.parametrize("value", [-1, 17, 8, 2**31 - 1])
def test_a_ring_whose_position_is_not_that_of_the_session(tmp_path: Path, value: int) -> None:
    model = zoo_model("llama")
    session = CompiledDecodeSession(model, 16, evidence="ignore")
    session.prefill([tokens(9)])
    session.save(tmp_path / "a")
    changed_array(tmp_path / "a", "2.2", value)
    with pytest.raises(SavedSessionInvalid, match="position of cache 2"):
        load(tmp_path / "a", model)


@pytest.mark.parametrize(
    "change", [{"ragged": True}, {"ragged": "yes"}, {"batch_size": 1}, {"batch_size": 3}]
)
@pytest.mark.parametrize("family", OTHERS)
def test_headers_that_contradict_the_arrays(tmp_path: Path, family: str, change: dict[str, Any]) -> None:
    model = zoo_model(family)
    session = CompiledDecodeSession(model, 16, 2, evidence="ignore")
    session.prefill([tokens(5), tokens(5)])
    session.save(tmp_path / "a")
    changed_session_header(tmp_path / "a", **change)
    with pytest.raises(SavedSessionInvalid):
        load(tmp_path / "a", model)


def test_a_ragged_file_for_rings_that_cannot_hold_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = tiny_model(num_hidden_layers=1)
    monkeypatch.setattr(type(model), "make_cache", lambda self: [RotatingKVCache(6, keep=2)], raising=False)
    session = CompiledDecodeSession(model, 16, 2, evidence="ignore")
    session.prefill([tokens(5), tokens(5)])
    session.save(tmp_path / "a")
    assert load(tmp_path / "a", model).position == 5
    changed_session_header(tmp_path / "a", ragged=True)
    with pytest.raises(SavedSessionInvalid, match="cannot hold rows of different length"):
        load(tmp_path / "a", model)
