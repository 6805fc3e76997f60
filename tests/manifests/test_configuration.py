"""Configurations: bounded JSON, every mistake with its place."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_audit.manifests import ConfigurationError, load_configuration
from mlx_audit.manifests.configuration import MAX_BYTES, MAX_DEPTH


def load(folder: Path, data: bytes) -> dict[str, object]:
    path = folder / "config.json"
    path.write_bytes(data)
    return load_configuration(path)


def test_a_configuration_is_read_as_it_is(tmp_path: Path) -> None:
    text = '{"a": [1, 2.5, null, true], "b": {"a": "x: {\\"a\\": NaN}"}, "limit": [0.0, Infinity]}'
    assert load(tmp_path, text.encode()) == json.loads(text)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b'{"a": 1,\n "b": 2,\n "a": 3}', "3:2: the key is there twice; found: 'a'"),
        (b'{"a": {"b": 1, "\\u0062": 2}}', "1:16: the key is there twice; found: 'b'"),
        (b'{"a": NaN}', "1:7: not a usable value; found: 'NaN'"),
        (b'{"a": 1e999}', "1:7: not a usable value"),
        (b'{"a": ' + b"9" * 5000 + b"}", "1:7: not a usable value"),
        (b'{"a": 1,}', "not JSON"),
        (b'{"a": 1\n', "2:1: not JSON"),
        (b'{"a": nul}', "1:7: not JSON"),
        (b"", "1:1: not JSON"),
        (b"[1]", "1:1: not a JSON object; found: [1]"),
        (b'{"a": "\xff"}', "1:8: not UTF-8; found: byte 0xff"),
        (b'{"a": ' + b"[" * 50 + b"]" * 50 + b"}", f"1:{6 + MAX_DEPTH}: nested too deeply"),
        (b"[" * 100_000, "nested too deeply"),
        (b" " * (MAX_BYTES + 1), "1:1: the file is too large"),
    ],
)
def test_mistakes_name_their_place(tmp_path: Path, data: bytes, message: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        load(tmp_path, data)
    assert f"config.json:{message}" in str(caught.value) or message in str(caught.value)
    assert caught.value.problems[0].line >= 1


def test_a_missing_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="cannot be read"):
        load_configuration(tmp_path / "absent.json")
    with pytest.raises(ConfigurationError, match="cannot be read"):
        load_configuration(tmp_path)


_JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**30), 10**30)
    | st.floats(allow_nan=False)
    | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.text(max_size=4), _JSON, max_size=4))
def test_whatever_json_writes_is_read_back(
    tmp_path_factory: pytest.TempPathFactory, value: dict[str, object]
) -> None:
    assert load(tmp_path_factory.getbasetemp(), json.dumps(value).encode()) == value


@given(st.binary(max_size=60) | st.text('{}[]:,"a1e.-NInfity \\\n', max_size=40).map(str.encode))
def test_anything_else_raises_only_configuration_errors(
    tmp_path_factory: pytest.TempPathFactory, data: bytes
) -> None:
    try:
        assert isinstance(load(tmp_path_factory.getbasetemp(), data), dict)
    except ConfigurationError as error:
        assert error.problems
