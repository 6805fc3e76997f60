"""SRC: what is taken of a folder, what stays behind, and hostile folders refused without opening what they point to."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from hf_folders import write_hf
from mlx_audit.convert.options import ConvertOptions
from mlx_audit.convert.source import resolve_source
from mlx_audit.errors import MlxAuditError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_hf(tmp_path / "hf")


def configure(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text(encoding="utf-8")), **changes}), encoding="utf-8")


def test_files_of_a_model_are_taken_and_code_and_pickles_stay(folder: Path) -> None:
    for name in (
        "modeling.py",
        "pytorch_model.bin",
        "x.pt",
        "consolidated.safetensors",
        ".gitattributes",
        "LICENSE",
    ):
        (folder / name).write_text("x")
    source = resolve_source(str(folder))
    assert source.kind == "hf"
    assert sorted(source.files) == [
        *("LICENSE", "README.md", "config.json"),
        *("model.safetensors", "tokenizer.json", "tokenizer_config.json"),
    ]
    assert source.left_out == [
        "consolidated.safetensors (not a file of a model that mlx-lm reads)",
        "modeling.py (code is never copied, nor run)",
        "pytorch_model.bin (a pickle could run code)",
        "x.pt (a pickle could run code)",
    ]


def test_weights_as_mlx_writes_them_need_no_conversion(tmp_path: Path) -> None:
    assert resolve_source(str(write_hf(tmp_path / "llama", form="mlx"))).needs_copy_only
    assert not resolve_source(str(write_hf(tmp_path / "pt"))).needs_copy_only


def test_a_snapshot_of_the_hubs_cache(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot = hub_cache(tmp_path / "hub", folder)
    source = resolve_source(str(snapshot))
    assert source.files["config.json"].parent.name == "blobs"
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert resolve_source("org/tiny").path == snapshot.resolve()
    with pytest.raises(MlxAuditError, match="cannot be had from the Hub"):
        resolve_source("org/other")


def hub_cache(cache: Path, folder: Path) -> Path:
    """Lay a folder out as the Hub's cache does, and return the snapshot."""
    root = cache / "models--org--tiny"
    revision = "0" * 40
    snapshot = root / "snapshots" / revision
    for place in (root / "blobs", root / "refs", snapshot):
        place.mkdir(parents=True)
    (root / "refs" / "main").write_text(revision)
    for path in folder.iterdir():
        path.rename(root / "blobs" / path.name)
        (snapshot / path.name).symlink_to(Path("../../blobs") / path.name)
    return snapshot


def _links_out(folder: Path, name: str, target: str = "/etc/passwd") -> None:
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to(target)


def _index(folder: Path, weight_map: Any) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


HOSTILE: dict[str, tuple[Callable[[Path], object], str]] = {
    "tokenizer links to /etc/passwd": (
        lambda f: _links_out(f, "tokenizer.json"),
        "a link leads out of the folder",
    ),
    "config links to /etc/passwd": (lambda f: _links_out(f, "config.json"), "a link leads out of the folder"),
    "weights link out": (lambda f: _links_out(f, "model-2.safetensors", "../../x"), "cannot be read"),
    "weights link to a device": (lambda f: _links_out(f, "model-2.safetensors", "/dev/zero"), "leads out"),
    "loop of links": (lambda f: _links_out(f, "merges.txt", "merges.txt"), "cannot be read"),
    "a pipe": (lambda f: os.mkfifo(f / "vocab.json"), "this is no file"),
    "a folder": (lambda f: (f / "added_tokens.json").mkdir(), "this is no file"),
    "line break in a name": (lambda f: (f / "model\n.safetensors").write_bytes(b""), "no usable name"),
    "escape in a name": (lambda f: (f / "model\x1b[2J.safetensors").write_bytes(b""), "no usable name"),
    "index leads out": (lambda f: _index(f, {"a": "../../x.safetensors"}), "the index does not match"),
    "index names another file": (
        lambda f: _index(f, {"model.norm.weight": "model-2.safetensors"}),
        "does not match",
    ),
    "index of a list": (lambda f: _index(f, [1]), "the index cannot be read"),
    "index of numbers": (lambda f: _index(f, {"model.norm.weight": 3}), "does not match"),
    "index that is none": (
        lambda f: (f / "model.safetensors.index.json").write_text("[" * 99_999),
        "cannot be read",
    ),
    "code of its own": (
        lambda f: configure(f, model_file="evil.py"),
        "wants to run a Python file of its own",
    ),
    "unknown family": (lambda f: configure(f, model_type="nowhere"), "mlx-lm has no such model type"),
    "family with a path": (lambda f: configure(f, model_type="../x"), "no usable model_type"),
    "family that is a number": (lambda f: configure(f, model_type=3), "no usable model_type"),
    "a billion layers": (
        lambda f: configure(f, num_hidden_layers=10**9),
        "more layers than there are tensors",
    ),
    "nested layers": (lambda f: configure(f, text_config={"num_hidden_layers": 1e12}), "more layers than"),
    "no configuration": (lambda f: (f / "config.json").unlink(), "no config.json"),
    "configuration of nothing": (lambda f: (f / "config.json").write_text(""), "not JSON"),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), "no weights"),
    "weights that lie": (lambda f: (f / "model.safetensors").write_bytes(b"\xff" * 99), "header is longer"),
    "weights cut short": (lambda f: os.truncate(f / "model.safetensors", 5_000), "."),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_folders_are_refused(folder: Path, case: str) -> None:
    harm, message = HOSTILE[case]
    harm(folder)
    with pytest.raises(MlxAuditError, match=message) as refused:
        resolve_source(str(folder))
    assert refused.value.exit_code == 2
    assert "root:" not in str(refused.value)
    assert "\x1b" not in str(refused.value)


def test_a_link_of_an_unknown_name_is_not_followed(folder: Path) -> None:
    _links_out(folder, "secret.txt")
    source = resolve_source(str(folder))
    assert source.left_out == ["secret.txt (not a file of a model that mlx-lm reads)"]


def test_a_tensor_in_two_files_is_refused(folder: Path) -> None:
    mx.save_safetensors(str(folder / "model-2.safetensors"), {"model.norm.weight": mx.zeros(64)})
    with pytest.raises(MlxAuditError, match="a tensor is in two files"):
        resolve_source(str(folder))


@pytest.mark.parametrize("text", ["nowhere", "/nowhere/x", "a/b/c", "nowhere.gguf", "../x y/z", "-/-"])
def test_what_is_nowhere(text: str) -> None:
    with pytest.raises(MlxAuditError):
        resolve_source(text)


def test_the_room_that_is_needed(folder: Path) -> None:
    source = resolve_source(str(folder))
    stored = sum(tensor.bytes for tensor in source.tensors.values())
    assert source.least_bytes(ConvertOptions()) == stored
    assert source.least_bytes(ConvertOptions(dtype="bfloat16")) == stored // 2
    packed = source.least_bytes(ConvertOptions(quantize=True))
    assert stored // 8 < packed < stored // 6
