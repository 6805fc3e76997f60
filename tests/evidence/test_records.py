"""Records: canonical bytes, a self-digest, and the reasons for which one no longer counts."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from evidence.conftest import every_check, of_other_code, result_of
from mlx_audit import resources
from mlx_audit.evidence import records as module
from mlx_audit.evidence.records import (
    Record,
    RecordError,
    find_record,
    lapse,
    load_record,
    make_record,
    record_path,
    search_path,
    staleness,
    write_record,
)
from mlx_audit.evidence.results import KillSummary
from mlx_audit.manifests import Manifest, find_manifest

INSTALLED = version("mlx")


def test_round_trip(record: Record, tmp_path: Path) -> None:
    path = write_record(record, tmp_path)
    assert (
        path
        == tmp_path / "qwen2" / f"{record.backend}.json"
        == record_path(tmp_path, "qwen2", record.backend)
    )
    loaded = load_record(path)
    unstated = {"digest": True, "variants": {"full": {"stated", "reason"}}}
    assert loaded.model_dump(exclude=unstated) == record.model_dump(exclude=unstated)
    assert loaded.digest.startswith("sha256:")
    assert loaded.to_json() == path.read_text(encoding="utf-8")
    assert path.stat().st_mode & 0o777 == 0o644


@pytest.mark.parametrize("what", ["dangling", "loop", "pipe", "device", "folder"])
def test_what_is_no_file_is_damaged_and_no_other_record_takes_its_place(
    record: Record, tmp_path: Path, what: str
) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    write_record(record, second)
    path = record_path(first, "qwen2", record.backend)
    path.parent.mkdir(parents=True)
    match what:
        case "pipe":
            os.mkfifo(path)
        case "folder":
            path.mkdir()
        case _:
            path.symlink_to({"dangling": "gone", "loop": path.name, "device": "/dev/zero"}[what])
    with pytest.raises(RecordError, match="cannot be read"):
        find_record("qwen2", record.backend, [first, second])
    assert find_record("qwen2", record.backend, [tmp_path / "third", second]) is not None


def test_no_link_leads_a_record_out_of_its_folder(record: Record, tmp_path: Path) -> None:
    """A cloned repository may hold a link to a file of the user's where its record belongs."""
    folder, precious = tmp_path / "records", tmp_path / "precious"
    precious.write_text("mine")
    path = record_path(folder, "qwen2", record.backend)
    path.parent.mkdir(parents=True)
    path.symlink_to(precious)
    with pytest.raises(RecordError, match="out of its folder"):
        write_record(record, folder)
    path.unlink()
    path.parent.rmdir()
    (tmp_path / "elsewhere").mkdir()
    path.parent.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(RecordError, match="out of its folder"):
        write_record(record, folder)
    assert precious.read_text() == "mine"
    assert not list((tmp_path / "elsewhere").iterdir())
    (tmp_path / "link").symlink_to(folder)
    path.parent.unlink()
    assert load_record(write_record(record, tmp_path / "link")).family == "qwen2"


def test_bytes_are_canonical_and_hold_no_times_or_paths(record: Record) -> None:
    text = record.to_json()
    data = json.loads(text)
    assert "µ" in text
    for result in data["variants"]["full"]["results"]:
        for found in result["checks"]:
            assert found.keys() <= {"code", "name", "tier", "status", "reason", "figures"}
    assert "seconds" not in text
    assert data["mlx"] == ".".join(INSTALLED.split(".")[:2])
    shuffled = Record.model_validate(_reversed(data))
    assert shuffled.to_json() == text


def _reversed(value: Any, *, but: tuple[str, ...] = ("results", "checks")) -> Any:
    """Return the same values with the keys of every mapping in the opposite order."""
    if isinstance(value, dict):
        return {key: _reversed(value[key]) for key in reversed(value)}
    return [_reversed(item) for item in value] if isinstance(value, list) else value


def test_a_reviewer_reads_the_verdict_first(record: Record) -> None:
    """Before the checks it is said what was claimed, and what came of it; a line is a line of a diff."""
    lines = record.to_json().splitlines()
    shown = [line.strip().split(":")[0].strip('"') for line in lines]
    first_check = next(index for index, line in enumerate(lines) if '"checks"' in line)
    assert {"family", "backend", "claimed", "verdict", "reason"} <= set(shown[:first_check])
    assert '   "verdict": "capable",' in lines
    assert any(line.strip().startswith('{"code": "PAR002"') for line in lines), "a short check is one line"
    assert all(len(line) <= 110 or line.count('"') <= 4 for line in lines), "what is longer is one value"
    assert "null" not in record.to_json()
    assert '"reason": ""' not in record.to_json()


def _edit(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], Any]:
    def edit(path: Path) -> None:
        data = json.loads(path.read_text(encoding="utf-8"))
        change(data)
        path.write_text(json.dumps(data), encoding="utf-8")

    return edit


def _resealed(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], Any]:
    """Change a record and give it the digest that belongs to it, as only its form is wrong."""

    def edit(path: Path) -> None:
        data = json.loads(path.read_text(encoding="utf-8"))
        change(data)
        data["digest"] = module.self_digest(data)
        path.write_text(json.dumps(data), encoding="utf-8")

    return edit


def _first_check(data: dict[str, Any]) -> dict[str, Any]:
    return data["variants"]["full"]["results"][0]["checks"][0]


DAMAGED: dict[str, tuple[Callable[[Path], Any], str]] = {
    "empty": (lambda path: path.write_text(""), "cannot be read"),
    "truncated": (lambda path: path.write_bytes(path.read_bytes()[:-20]), "cannot be read"),
    "binary": (lambda path: path.write_bytes(bytes(range(256))), "cannot be read"),
    "deep": (lambda path: path.write_text("[" * 100_000), "cannot be read"),
    "list": (lambda path: path.write_text("[]"), "another format version"),
    "folder": (lambda path: (path.unlink(), path.mkdir()), "cannot be read"),
    "oversized": (lambda path: os.truncate(path, (16 << 20) + 1), "too large"),
    "other schema": (_edit(lambda data: data.update(schema="mlx-audit/record/3")), "another format version"),
    "old schema": (_edit(lambda data: data.update(schema="mlx-audit/record/1")), "another format version"),
    "no schema": (_edit(lambda data: data.pop("schema")), "another format version"),
    "status changed": (_edit(lambda data: _first_check(data).update(status="fail")), "changed after"),
    "figure changed": (
        _edit(lambda data: _first_check(data).update(figures={"largest": 1.0})),
        "changed after",
    ),
    "check removed": (
        _edit(lambda data: data["variants"]["full"]["results"][0]["checks"].pop()),
        "changed after",
    ),
    "mlx changed": (_edit(lambda data: data.update(mlx="9.9")), "changed after"),
    "key added": (_edit(lambda data: data.update(more=1)), "changed after"),
    "digest gone": (_edit(lambda data: data.pop("digest")), "changed after"),
    "digest of another type": (_edit(lambda data: data.update(digest=["x"])), "changed after"),
    "half a character": (_edit(lambda data: data.update(family="\ud800")), "cannot be read"),
    "unknown key, sealed": (_resealed(lambda data: data.update(more=1)), "form of its schema"),
    "unknown status, sealed": (
        _resealed(lambda data: _first_check(data).update(status="ok")),
        "form of its schema",
    ),
    "verdict flipped": (
        _edit(lambda data: data["variants"]["full"].update(verdict="limited")),
        "changed after",
    ),
    "verdict flipped, sealed": (
        _resealed(lambda data: data["variants"]["full"].update(verdict="limited")),
        "the verdict of variant full does not follow from its checks",
    ),
    "reason changed, sealed": (
        _resealed(lambda data: data["variants"]["full"].update(reason="99 checks passed")),
        "does not follow from its checks",
    ),
    "status changed, sealed": (
        _resealed(lambda data: _first_check(data).update(status="fail")),
        "does not follow from its checks",
    ),
    "limits taken away, sealed": (
        _resealed(lambda data: data["variants"]["full"].update(limits=["no padding"])),
        "does not follow from its checks",
    ),
    "check twice, sealed": (
        _resealed(lambda data: data["variants"]["full"]["results"][0]["checks"].append(_first_check(data))),
        "does not follow from its checks",
    ),
    "file changed, sealed": (
        _resealed(lambda data: data["files"]["model"].update({"mlx_lm/models/base.py": "0" * 64})),
        "the digest `model` does not follow from its files",
    ),
    "file gone, sealed": (
        _resealed(lambda data: data["files"]["toolkit"].pop("mlx_audit/caches/slots.py")),
        "the digest `toolkit` does not follow from its files",
    ),
    "digest changed, sealed": (
        _resealed(lambda data: data["digests"].update(model="sha256:0")),
        "the digest `model` does not follow from its files",
    ),
    "no variants, sealed": (_resealed(lambda data: data.pop("variants")), "form of its schema"),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_damage_is_a_record_error(name: str, record: Record, tmp_path: Path) -> None:
    path = write_record(record, tmp_path)
    damage, message = DAMAGED[name]
    damage(path)
    with pytest.raises(RecordError, match=message) as caught:
        load_record(path)
    assert caught.value.fix == "mlx-audit run qwen2 --record"


def test_the_verdict_is_recomputed_from_the_checks(record: Record) -> None:
    manifest = find_manifest("qwen2")
    assert manifest is not None
    assert record.variants["full"].verdict().name == "capable"
    for status, verdict in (("fail", "not-capable"), ("not-run", "undecided")):
        # The result says `capable`, and is not believed.
        results = [result_of(*every_check()), result_of(*every_check(status=status), configuration="other")]
        made = make_record(manifest, results, "cpu", INSTALLED)
        assert made.variants["full"].verdict().name == verdict
    limited = make_record(manifest, [result_of(*every_check(), limits=["no padding"])], "cpu", INSTALLED)
    assert limited.variants["full"].verdict() == ("limited", "no padding")


def manifest_of_qwen2() -> Manifest:
    manifest = find_manifest("qwen2")
    assert manifest is not None
    return manifest


def test_a_fresh_record_is_not_stale(record: Record) -> None:
    assert staleness(record, manifest_of_qwen2(), mlx_version=INSTALLED) == []
    # Patch releases of one minor version share a record.
    assert staleness(record, manifest_of_qwen2(), mlx_version=f"{record.mlx}.99") == []


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"mlx": "0.1"}, "recorded with mlx 0.1, installed is"),
        ({"digests": {"model": "sha256:0"}}, "the source of mlx_lm.models.qwen2 changed"),
        ({"digests": {"toolkit": "sha256:0"}}, "caches, adapters or decode changed"),
        ({"digests": {"manifest": "sha256:0"}}, "what qwen2.yaml states changed"),
        ({"digests": {"toolkit": None}}, "caches, adapters or decode changed"),
    ],
    ids=["mlx", "model", "toolkit", "manifest", "digest missing"],
)
def test_what_makes_a_record_stale(record: Record, change: dict[str, Any], reason: str) -> None:
    if "digests" in change:
        digests = {**record.digests, **change["digests"]}
        change = {"digests": {key: value for key, value in digests.items() if value is not None}}
    (found,) = staleness(record.model_copy(update=change), manifest_of_qwen2(), mlx_version=INSTALLED)
    assert reason in found


def test_a_record_of_a_module_that_is_gone_is_stale(record: Record) -> None:
    module = "mlx_lm.models.no_such_family"
    gone = manifest_of_qwen2().model_copy(update={"module": module})
    old = record.model_copy(update={"module": module})
    assert any("no_such_family" in reason for reason in staleness(old, gone, mlx_version=INSTALLED))
    assert staleness(record, gone, mlx_version=INSTALLED) == [
        "the record is about another module: mlx_lm.models.qwen2"
    ]


def test_limits_and_variants_are_those_of_the_manifest(record: Record) -> None:
    """The digest of the manifest covers both; a record that states others was changed to say more, or of nobody."""
    limited = record.model_copy(deep=True)
    limited.variants["full"].limits = ["text only"]
    (reason,) = staleness(limited, manifest_of_qwen2(), mlx_version=INSTALLED)
    assert reason == "full was recorded with other limits than qwen2.yaml states"
    record.variants["more"] = record.variants["full"]
    assert staleness(record, manifest_of_qwen2(), mlx_version=INSTALLED) == ["qwen2.yaml has no variant more"]


def test_staleness_names_the_file(record: Record) -> None:
    """Changed, added or removed; the files of the other digest are not named."""
    old = of_other_code(record, "model", "mlx_lm/models/rope_utils.py")
    del old.files["model"]["mlx_lm/models/base.py"]
    old.files["model"]["mlx_lm/models/gone.py"] = "0" * 64
    found = lapse(old, manifest_of_qwen2(), mlx_version=INSTALLED)
    (reason,) = found.reasons
    assert reason == (
        "the source of mlx_lm.models.qwen2 changed since: mlx_lm/models/base.py added, "
        "mlx_lm/models/gone.py removed, mlx_lm/models/rope_utils.py changed"
    )
    names = ["base", "gone", "rope_utils"]
    assert found.files == [f"mlx_lm/models/{name}.py" for name in names]
    own = lapse(of_other_code(record, "toolkit"), manifest_of_qwen2(), mlx_version=INSTALLED)
    assert own.files == ["mlx_audit/caches/__init__.py"]
    stated = lapse(of_other_code(record, "manifest"), manifest_of_qwen2(), mlx_version=INSTALLED)
    assert stated.files == ["qwen2.yaml"]


def test_a_summary_of_planted_faults_is_kept_as_it_is(record: Record, tmp_path: Path) -> None:
    faults = KillSummary(
        profile="ci", killed={"TRC001": ["frozen position"]}, unshown=["x"], digest="sha256:1"
    )
    record.variants["full"].faults = faults
    assert load_record(write_record(record, tmp_path)).variants["full"].faults == faults


def test_search_order(record: Record, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLX_AUDIT_RECORDS", raising=False)
    monkeypatch.chdir(tmp_path)
    shipped = resources.model_audits() / "records"
    given, named, here = tmp_path / "given", tmp_path / "named", tmp_path / "model_audits"
    here.mkdir()
    assert search_path() == [shipped]
    assert search_path(given) == [given, shipped]
    assert search_path(working_directory=True) == [Path("model_audits/records"), shipped]
    monkeypatch.setenv("MLX_AUDIT_RECORDS", str(named))
    assert search_path(given, working_directory=True) == [given, named, Path("model_audits/records"), shipped]
    assert search_path() == [named, shipped]  # a library never reads the working directory
    monkeypatch.setenv("MLX_AUDIT_RECORDS", "")
    assert search_path() == [shipped]


def test_the_first_record_found_counts(record: Record, tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("a", "b", "c")]
    assert find_record("qwen2", record.backend, folders) is None
    write_record(record.model_copy(update={"mlx": "2.2"}), folders[2])
    assert find_record("qwen2", record.backend, folders).mlx == "2.2"
    write_record(record.model_copy(update={"mlx": "1.1"}), folders[1])
    assert find_record("qwen2", record.backend, folders).mlx == "1.1"
    assert find_record("qwen2", "other", folders) is None
    assert find_record("llama", record.backend, folders) is None


def test_a_record_in_the_wrong_place_is_refused(record: Record, tmp_path: Path) -> None:
    """A copied file must not prove another family, or another backend."""
    path = write_record(record, tmp_path)
    for family, backend in (("llama", record.backend), ("qwen2", "metal")):
        copy = record_path(tmp_path, family, backend)
        copy.parent.mkdir(exist_ok=True)
        copy.write_bytes(path.read_bytes())
        with pytest.raises(RecordError, match="another family or backend"):
            find_record(family, backend, [tmp_path])
