"""Stamps: when they no longer match the folder, the code or themselves, and who says so."""

from __future__ import annotations

import gc
import json
import os
import warnings
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

import mlx_audit
from mlx_audit import CompiledDecodeSession
from mlx_audit.errors import NotCompileCapable
from mlx_audit.evidence import stamps
from mlx_audit.evidence.codes import check_tiers, needed_codes
from mlx_audit.evidence.file_hashes import hash_files
from mlx_audit.evidence.records import minor
from mlx_audit.evidence.results import ClaimResult
from mlx_audit.evidence.stamps import (
    StaleStamp,
    Stamp,
    StampedCheck,
    StampedFile,
    StampError,
    check_stamp,
    load_stamp,
    model_files,
    stamp_digests,
    write_stamp,
)
from mlx_audit.models.origins import folder_of
from real_checkpoints import flip, write_folder

MODULE = "mlx_lm.models.qwen2"


def stamp_of(folder: Path, **changes: Any) -> Stamp:
    """Return a stamp as a green audit of the folder would leave it."""
    files = hash_files(folder, model_files(folder))
    values: dict[str, Any] = {
        "family": "qwen2",
        "module": MODULE,
        "variant": "full",
        "verdict": "capable",
        "claims": {"compiled_decode": ClaimResult(claimed="capable", verdict="capable")},
        "backend": "cpu",
        "mlx": minor(version("mlx")),
        "profile": "quick",
        "seed": 0,
        "digests": stamp_digests("qwen2", MODULE),
        "checks": [
            StampedCheck(code=code, tier=check_tiers()[code], status="pass")
            for code in sorted(needed_codes())
        ],
        "files": {name: StampedFile(bytes=f.bytes, sha256=f.sha256) for name, f in files.items()},
        "check_again": "mlx-audit run .",
    }
    return Stamp(**{**values, **changes})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "tiny").mkdir()
    place = write_folder(tmp_path / "tiny")
    write_stamp(stamp_of(place), place)
    return place


def edit(folder: Path, change: Callable[[dict[str, Any]], object], *, digest: bool = True) -> None:
    """Change a stamp's data, as a hand would, or as a forger who also recomputes the digest."""
    path = folder / stamps.FILE
    data = json.loads(path.read_text(encoding="utf-8"))
    change(data)
    if digest:
        data["digest"] = stamps._self_digest(data)
    path.write_text(json.dumps(data), encoding="utf-8")


def test_a_fresh_stamp_matches_and_no_stamp_says_nothing(folder: Path, tmp_path: Path) -> None:
    assert check_stamp(folder) == []
    stamp = load_stamp(folder)
    assert stamp is not None
    assert sorted(stamp.files) == ["config.json", "model.safetensors"]
    (tmp_path / "none").mkdir()
    assert check_stamp(write_folder(tmp_path / "none")) == []
    assert load_stamp(tmp_path / "none") is None


@pytest.mark.parametrize("at", [0, 8, 5_000, -1])
def test_one_changed_weight_byte_is_seen_though_size_and_time_are_as_they_were(folder: Path, at: int) -> None:
    weights = folder / "model.safetensors"
    assert check_stamp(folder) == []  # so that it was read once in this process
    flip(weights, at % weights.stat().st_size)
    assert check_stamp(folder) == ["model.safetensors changed since (sha256)"]
    flip(weights, at % weights.stat().st_size)
    assert check_stamp(folder) == []


def test_files_that_come_go_shrink_or_are_none(folder: Path) -> None:
    weights, config = folder / "model.safetensors", folder / "config.json"
    size = weights.stat().st_size
    weights.write_bytes(weights.read_bytes()[:-1])
    config.write_text(config.read_text(encoding="utf-8").replace("32", "33", 1), encoding="utf-8")
    for added in ("model-2.safetensors", "tokenizer.json", "generation_config.json"):
        (folder / added).write_text("{}", encoding="utf-8")
    (folder / "notes.txt").write_text("decides nothing")
    (folder / "README.md").write_text("decides nothing")
    assert sorted(check_stamp(folder)) == [
        "config.json changed since (sha256)",
        "generation_config.json was added since",
        "model-2.safetensors was added since",
        f"model.safetensors changed since: {size - 1:,} bytes, stamped were {size:,}",
        "tokenizer.json was added since",
    ]
    weights.unlink()
    config.unlink()
    config.mkdir()
    reasons = check_stamp(folder)
    assert "model.safetensors is gone since" in reasons
    assert "config.json cannot be read: this is no regular file" in reasons


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"mlx": "0.1"}, "stamped with mlx 0.1, installed is"),
        (
            {"digests": {**stamp_digests("qwen2", MODULE), "model": "sha256:0"}},
            f"the source of {MODULE} changed since",
        ),
        (
            {"digests": {**stamp_digests("qwen2", MODULE), "toolkit": "x"}},
            "caches, adapters or decode changed since",
        ),
        (
            {"digests": {**stamp_digests("qwen2", MODULE), "manifest": "x"}},
            "the manifest of qwen2 changed since",
        ),
        ({"digests": {}}, "the manifest of qwen2 changed since"),
        ({"module": "mlx_lm.models.nowhere"}, "the source of mlx_lm.models.nowhere cannot be read"),
        ({"verdict": "not-capable"}, "it says not-capable, and its checks say capable"),
        ({"limits": ["only here"]}, "it says capable, and its checks say limited"),
        ({"checks": []}, "it says capable, and its checks say undecided: no check was run"),
        (
            {"checks": [StampedCheck(code="PAR001", tier="numeric", status="pass")]},
            f"it says capable, and its checks say undecided: it lacks {', '.join(sorted(needed_codes() - {'PAR001'}))}",
        ),
        ({"files": {}}, "config.json was added since"),
    ],
)
def test_code_mlx_and_verdict(folder: Path, change: dict[str, Any], reason: str) -> None:
    write_stamp(stamp_of(folder, **change), folder)
    assert any(reason in found for found in check_stamp(folder)), check_stamp(folder)


def test_a_forged_verdict_does_not_follow_from_its_checks(folder: Path) -> None:
    def forged(data: dict[str, Any]) -> None:
        data["checks"][0]["status"] = "fail"

    edit(folder, forged)
    assert check_stamp(folder) == ["it says capable, and its checks say not-capable"]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (
            lambda data: data.update(verdict="limited"),
            "the stamp was changed after it was written (self-digest)",
        ),
        (lambda data: data.pop("digest"), "the stamp was changed after it was written (self-digest)"),
        (lambda data: data.update(schema="mlx-audit/stamp/9"), "the stamp is of another format version"),
    ],
    ids=["verdict", "no digest", "schema"],
)
def test_edited_stamps(folder: Path, change: Callable[[dict[str, Any]], object], reason: str) -> None:
    edit(folder, change, digest=False)
    assert check_stamp(folder)[0].startswith(reason)


@pytest.mark.parametrize("name", ["../x", "/etc/passwd", "..", "a/b", "", "x\n", "a\\b", "x" * 300])
def test_files_outside_the_folder_are_never_read(folder: Path, name: str) -> None:
    edit(folder, lambda data: data["files"].update({name: {"bytes": 1, "sha256": "0" * 64}}))
    (reason,) = check_stamp(folder)
    assert reason.startswith("the stamp names a file outside its folder")


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "the stamp cannot be read"),
        (b"{", "the stamp cannot be read"),
        (b"\xff\xfe", "the stamp cannot be read"),
        (b"[" * 100_000, "the stamp cannot be read"),
        (b"[]", "the stamp is of another format version: list"),
        (b" " * (5 << 20), "the stamp is too large"),
        (b'{"schema": "mlx-audit/stamp/1"}', "the stamp was changed after it was written"),
    ],
    ids=["empty", "cut", "no text", "deep", "list", "large", "no digest"],
)
def test_damaged_stamps(folder: Path, data: bytes, reason: str) -> None:
    (folder / stamps.FILE).write_bytes(data)
    with pytest.raises(StampError):
        load_stamp(folder)
    assert check_stamp(folder)[0].startswith(reason)


@pytest.mark.parametrize("kind", ["folder", "pipe", "dangling link"])
def test_what_is_no_stamp_file_is_said_and_not_waited_for(folder: Path, kind: str) -> None:
    path = folder / stamps.FILE
    path.unlink()
    {
        "folder": path.mkdir,
        "pipe": lambda: os.mkfifo(path),
        "dangling link": lambda: path.symlink_to("nowhere"),
    }[kind]()
    assert check_stamp(folder)[0].startswith("the stamp cannot be read")


def test_the_text_is_canonical_and_holds_no_path_of_this_machine(folder: Path) -> None:
    text = (folder / stamps.FILE).read_text(encoding="utf-8")
    assert str(folder.parent) not in text
    assert '"/' not in text
    data = json.loads(text)
    assert list(data) == sorted(data)
    stamp = load_stamp(folder)
    assert stamp is not None
    assert stamp.to_json() == text
    assert stamp_of(folder).to_json() == text


def test_a_session_over_a_stamped_model_warns_once_for_a_state_of_the_folder(folder: Path) -> None:
    model, tokenizer = mlx_audit.load(folder)
    assert tokenizer is None
    assert folder_of(model) == folder
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        CompiledDecodeSession(model, 8)
    flip(folder / "model.safetensors", 6_000)
    with pytest.warns(
        StaleStamp, match=r"stamp: stale: model\.safetensors changed since .*fix: mlx-audit convert"
    ):
        CompiledDecodeSession(model, 8)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        CompiledDecodeSession(model, 8)
    flip(folder / "config.json", 3)
    with pytest.warns(StaleStamp, match=r"config\.json changed since"):
        CompiledDecodeSession(model, 8)


def test_a_stamp_makes_nothing_capable(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    empty = tmp_path / "records" / "qwen2"
    empty.mkdir(parents=True)
    (empty / "cpu.json").write_text("{}", encoding="utf-8")
    assert check_stamp(folder) == []
    model, _ = mlx_audit.load(folder)
    with pytest.raises(NotCompileCapable):
        CompiledDecodeSession(model, 8, records=empty.parent)


def test_where_a_model_came_from_is_forgotten_with_it(folder: Path) -> None:
    from mlx_audit.models import origins

    model, _ = mlx_audit.load(folder)
    known = id(model)
    assert known in origins._folders
    del model
    gc.collect()
    assert known not in origins._folders
