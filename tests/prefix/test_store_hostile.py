"""Nobody's store is trusted: each kind of damage is refused with its own reason, and nothing is loaded in part."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mlx_audit.prefix.reasons import PrefixRefused, Reason
from mlx_audit.prefix.store import load, save
from mlx_audit.prefix.store_files import MANIFEST
from mlx_audit.prefix.store_format import FORMAT, _seal
from prefix_models import WORLD, bodies, refused


def edited(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change a manifest as somebody does who also corrects its checksum."""
    path = folder / MANIFEST
    document = json.loads(path.read_bytes())
    change(document)
    document["sha256"] = _seal(document["content"])
    path.write_text(json.dumps(document))


def layer_of(document: dict[str, Any], entry: int = 1, layer: int = 0) -> dict[str, Any]:
    found: dict[str, Any] = document["content"]["entries"][entry]["layers"][layer]
    return found


def other_version(document: dict[str, Any]) -> None:
    document["format"] = "mlx-audit/prefix-store/2"


CHANGES: list[tuple[Callable[[dict[str, Any]], Any], Reason, str]] = [
    (other_version, Reason.FORMAT_VERSION, FORMAT),
    (lambda d: d.update(author="x"), Reason.UNKNOWN_FIELD, "author"),
    (lambda d: d["content"].update(author="x"), Reason.UNKNOWN_FIELD, "author"),
    (lambda d: layer_of(d).update(author="x"), Reason.UNKNOWN_FIELD, "entries.1.layers.0.author"),
    (lambda d: layer_of(d).update(native="Evil"), Reason.UNKNOWN_CLASS, "rotating Evil"),
    (lambda d: layer_of(d).update(kind="pickled"), Reason.UNKNOWN_CLASS, "pickled"),
    (lambda d: layer_of(d)["parameters"].update(max_size=17), Reason.POSITION_MISMATCH, "17 rows"),
    (lambda d: layer_of(d)["parameters"].update(_idx=99), Reason.POSITION_MISMATCH, "cursor"),
    (lambda d: layer_of(d)["parameters"].pop("_idx"), Reason.POSITION_MISMATCH, "parameters"),
    (lambda d: layer_of(d)["parameters"].update(x=1), Reason.POSITION_MISMATCH, "parameters"),
    (lambda d: layer_of(d).update(position=39), Reason.POSITION_MISMATCH, "entry 1 layer 0"),
    (lambda d: layer_of(d).update(position=-1), Reason.DAMAGED, "position"),
    (lambda d: layer_of(d).update(position="40"), Reason.DAMAGED, "position"),
    (lambda d: layer_of(d).update(position=True), Reason.DAMAGED, "position"),
    (lambda d: layer_of(d)["forms"].pop(), Reason.POSITION_MISMATCH, "2 arrays"),
    (lambda d: layer_of(d)["forms"][0].update(dtype="object"), Reason.DAMAGED, "object"),
    (lambda d: layer_of(d)["forms"][0].update(dtype="int8"), Reason.DAMAGED, "another form"),
    (lambda d: layer_of(d)["forms"][0]["shape"].append(2**40), Reason.DAMAGED, "shape"),
    (lambda d: d["content"]["entries"][1].update(tokens="AAAA"), Reason.DAMAGED, "token ids"),
    (lambda d: d["content"]["entries"][1].update(tokens="//////////8="), Reason.DAMAGED, "token ids"),
    (lambda d: d["content"]["entries"][1].update(tokens="é"), Reason.DAMAGED, "base64"),
    (lambda d: d["content"]["entries"][1].update(tokens=""), Reason.BELOW_MINIMUM, "entry 1"),
    (lambda d: d["content"]["entries"][1].update(body="../x.safetensors"), Reason.DAMAGED, "../x"),
    (lambda d: d["content"]["entries"][1].update(body="/etc/passwd"), Reason.DAMAGED, "passwd"),
    (lambda d: d["content"]["entries"][1].update(stops=[8, 39]), Reason.DAMAGED, "chunks do not lead"),
    (lambda d: d["content"]["entries"][1].update(stops=[-1, 40]), Reason.DAMAGED, "stops"),
    (lambda d: d["content"]["entries"][1].update(kind="robot"), Reason.DAMAGED, "kind"),
    (lambda d: d["content"]["entries"][1].pop("kind"), Reason.DAMAGED, "kind"),
    (lambda d: d["content"]["entries"][1].update(size=1), Reason.DAMAGED, "cut or lengthened"),
    (lambda d: d["content"]["entries"].append(d["content"]["entries"][0]), Reason.DAMAGED, "one key"),
    (lambda d: d["content"].update(entries=[[]] * 3), Reason.DAMAGED, "entries"),
    (lambda d: d.update(content=None), Reason.DAMAGED, ""),
    (lambda d: d["content"]["parts"].update(weights="0" * 64), Reason.OTHER_FINGERPRINT, "weights"),
]


@pytest.mark.parametrize("index", range(len(CHANGES)))
def test_a_manifest_that_was_changed_and_sealed_again_is_refused_by_what_it_says(
    store: Path, index: int
) -> None:
    change, reason, told = CHANGES[index]
    edited(store, change)
    error = refused(store)
    assert error.reason is reason, str(error)
    assert told in str(error)
    assert str(store) in str(error)


def test_a_manifest_that_was_changed_alone_is_damaged(store: Path) -> None:
    path = store / MANIFEST
    text_ = path.read_text()
    path.write_text(text_.replace('"_idx": 3', '"_idx": 4', 1))
    assert path.read_text() != text_
    error = refused(store)
    assert error.reason is Reason.DAMAGED
    assert "checksum" in str(error)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"null",
        b"{}",
        b"[" * 100_000,
        b'{"format": 1, "format": 2}',
        b"\xff\xfe",
        b'{"format": "mlx-audit/prefix-store/1"}',
        b'{"format": ' + b"9" * 5000 + b"}",
        b'{"format": "mlx-audit/prefix-store/1", "sha256": 1, "content": 1e999}',
    ],
)
def test_what_is_no_manifest_is_a_typed_error(store: Path, content: bytes) -> None:
    (store / MANIFEST).write_bytes(content)
    assert refused(store).reason is Reason.DAMAGED


@pytest.mark.parametrize(
    "content", [b" " * ((64 << 20) + 1), b"[" + b"[]," * 5_000_000 + b"1]"], ids=["long", "many"]
)
def test_a_manifest_that_would_fill_the_memory_is_not_read(store: Path, content: bytes) -> None:
    (store / MANIFEST).write_bytes(content)
    assert refused(store).reason is Reason.TOO_LARGE


def test_layers_nested_without_end_are_refused(store: Path) -> None:
    def nest(document: dict[str, Any]) -> None:
        layer = layer_of(document)
        for _ in range(200):
            layer = {**layer, "kind": "composite", "native": "CacheList", "parts": [layer]}
        document["content"]["entries"][1]["layers"][0] = layer

    edited(store, nest)
    assert refused(store).reason is Reason.DAMAGED


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def altered(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def a_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def a_link(path: Path) -> None:
    path.rename(path.with_suffix(".elsewhere"))
    path.symlink_to(path.with_suffix(".elsewhere"))


@pytest.mark.parametrize(
    ("damage", "at_load", "told"),
    [
        (cut, True, "cut or lengthened"),
        (lambda path: path.write_bytes(path.read_bytes() + b"x"), True, "cut or lengthened"),
        (Path.unlink, True, "missing"),
        (a_link, True, "missing or cannot be read"),
        (a_pipe, True, "not a regular file"),
        (altered, False, "checksum"),
    ],
)
def test_one_damaged_body_refuses_and_nothing_of_it_is_read(
    store: Path, damage: Callable[[Path], None], at_load: bool, told: str
) -> None:
    victim = bodies(store)[1]
    damage(victim)
    if at_load:
        with pytest.raises(PrefixRefused, match=told) as caught:
            load(store, WORLD)
        assert caught.value.reason is Reason.DAMAGED
        return
    with pytest.raises(PrefixRefused, match=told):
        load(store, WORLD, verify=True)
    for entry in load(store, WORLD):
        if entry.path == victim:
            with pytest.raises(PrefixRefused, match=told) as caught:
                entry.snapshot()
            assert caught.value.reason is Reason.DAMAGED
        else:
            assert entry.snapshot().position == entry.position


def test_a_body_that_is_replaced_after_loading_is_refused_when_it_is_wanted(store: Path) -> None:
    entries = load(store, WORLD)
    save(store, [], WORLD)
    with pytest.raises(PrefixRefused, match="missing") as caught:
        entries[0].snapshot()
    assert caught.value.reason is Reason.DAMAGED


@pytest.mark.parametrize("which", [MANIFEST, "folder"])
def test_a_store_that_is_not_there_is_a_typed_error(store: Path, which: str) -> None:
    if which == "folder":
        shutil.rmtree(store)
    else:
        (store / which).unlink()
    assert refused(store).reason is Reason.DAMAGED
