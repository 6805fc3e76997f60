"""Reading foreign files: only regular ones, bounded, and JSON that stays small."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from mlx_audit.manifests.files import MOST_KEYS, read_bounded, read_json, real


def test_one_byte_more_than_allowed_is_read_and_no_more(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"x" * 100)
    assert [len(read_bounded(file, most)) for most in (99, 100, 10)] == [100, 100, 11]


def test_what_is_no_file_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for name in ("pipe", "link", "loop", "absent", "a\0b"):
        with pytest.raises(OSError):
            read_bounded(tmp_path / name, 10)
    for path in (tmp_path, Path("/dev/zero"), Path("/dev/stdin")):
        with pytest.raises(OSError):
            read_bounded(path, 10)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (b'{"a": 1, "b": 2, "a": 1}', "the key 'a' is there twice"),
        (b'[{"a": {"b": 1, "b": 2}}]', "the key 'b' is there twice"),
        (b"[" + b"{}," * 1000 + b"{}]", "more than 1,000 values"),
        (b"{" + b",".join(b'"%d":1' % n for n in range(MOST_KEYS + 1)) + b"}", "values"),
        (b" " * 200_001, "more than 200,000 bytes"),
        (b"\xff", "utf-8"),
        (b"{", "Expecting"),
        (b"9" * 5000, "digits"),
    ],
)
def test_json_that_is_refused(text: bytes, says: str, tmp_path: Path) -> None:
    file = tmp_path / "file.json"
    file.write_bytes(text)
    with pytest.raises(ValueError, match=says):
        read_json(file, 200_000, 1_000)


def test_json_that_is_read(tmp_path: Path) -> None:
    file = tmp_path / "file.json"
    file.write_text('{"a": [1, {"b": null}], "\\u00e9": "x,[{"}', encoding="utf-8")
    assert read_json(file, 1_000, 20) == {"a": [1, {"b": None}], "é": "x,[{"}
    file.write_text("{" + ",".join(f'"{n}":1' for n in range(MOST_KEYS + 1)) + "}")
    with pytest.raises(ValueError, match="keys"):
        read_json(file, 1 << 20, 1 << 20)
    file.write_bytes(b"[" * 100_000)
    with pytest.raises(RecursionError):
        read_json(file, 1 << 20, 1 << 20)


def test_a_loop_of_links_is_a_path_all_the_same(tmp_path: Path) -> None:
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    assert real(loop) == loop
    assert real(tmp_path / "a" / ".." / "b") == tmp_path.resolve() / "b"


def test_half_a_surrogate_pair_is_refused_and_a_whole_one_is_text(tmp_path: Path) -> None:
    file = tmp_path / "file.json"
    file.write_text('{"a": "\\uD800"}', encoding="utf-8")
    with pytest.raises(ValueError, match="surrogates not allowed"):
        read_json(file, 100, 100)
    file.write_text('{"a": "\\ud83d\\ude00"}', encoding="utf-8")
    assert read_json(file, 100, 100) == {"a": "😀"}
