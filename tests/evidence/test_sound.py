"""Records of the right form and with a fitting digest that no audit would have written."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mlx_audit import resources
from mlx_audit.checks.profiles import PROFILES as OF_CHECKS
from mlx_audit.evidence.record_schema import self_digest
from mlx_audit.evidence.records import Record, RecordError, load_record, write_record
from mlx_audit.evidence.sound import PROFILES, unsound

CONDITION = {"what": "reads the position", "needs": ["Attention"], "when": "kind == 'far'"}

Change = Callable[[dict[str, Any]], object]


def variant(data: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = data["variants"]["full"]
    return found


def check(data: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = variant(data)["results"][0]["checks"][0]
    return found


def conditional(value: object) -> Change:
    return lambda data: check(data).update(figures={"conditional": value})


def renamed(part: str, name: str) -> Change:
    """A file of a digest under another name: the digest counts only what stands behind the last slash."""

    def change(data: dict[str, Any]) -> None:
        files = data["files"][part]
        base = "mlx_lm/models/base.py"
        data["files"][part] = {name.format("base.py") if old == base else old: d for old, d in files.items()}

    return change


UNSOUND: dict[str, tuple[Change, str]] = {
    "configuration twice": (
        lambda data: variant(data)["results"].append(variant(data)["results"][0]),
        "twice",
    ),
    "profile": (lambda data: variant(data).update(profile="ci; rm -rf ~"), "unknown profile"),
    "seed below 0": (lambda data: variant(data).update(seed=-1), "impossible seed"),
    "seed too large": (lambda data: variant(data).update(seed=2**64), "impossible seed"),
    "a number": (conditional(5), "no list of conditions"),
    "nothing": (conditional(None), "no list of conditions"),
    "one condition": (conditional(CONDITION), "no list of conditions"),
    "more keys": (conditional([{**CONDITION, "unless": "x"}]), "no list of conditions"),
    "needs a number": (conditional([{**CONDITION, "needs": [1]}]), "no list of conditions"),
    "needs a text": (conditional([{**CONDITION, "needs": "Attention"}]), "no list of conditions"),
    "when a number": (conditional([{**CONDITION, "when": 5}]), "no list of conditions"),
    "what a list": (conditional([{**CONDITION, "what": []}]), "no list of conditions"),
    "command": (lambda data: check(data).update(reproduce="rm -rf ~"), "a place or a command"),
    "place": (lambda data: check(data).update(where="/etc/passwd:1"), "a place or a command"),
    "class of no adapter": (lambda data: data.update(adapter="mine:Adapter"), "belong together"),
    "files of nothing": (
        lambda data: data["files"].update(more={"a/b.py": "0"}),
        "a digest that is not there",
    ),
    "another folder": (renamed("model", "mlx_lm/../../{}"), "no file of a package"),
    "absolute": (renamed("model", "/etc/{}"), "no file of a package"),
    "no Python": (
        lambda data: data["files"]["toolkit"].update({"mlx_audit/x.so": "0"}),
        "no file of a package",
    ),
    "control": (lambda data: data["files"]["toolkit"].update({"\x1b[31m/x.py": "0"}), "no file of a package"),
}


@pytest.mark.parametrize("name", UNSOUND)
def test_it_is_refused_though_its_digest_fits(name: str, record: Record, tmp_path: Path) -> None:
    change, what = UNSOUND[name]
    path = write_record(record, tmp_path)
    assert load_record(path).family == "qwen2"
    data = json.loads(path.read_text(encoding="utf-8"))
    change(data)
    path.write_text(json.dumps({**data, "digest": self_digest(data)}), encoding="utf-8")
    with pytest.raises(RecordError) as caught:
        load_record(path)
    assert what in caught.value.what


def test_conditions_that_sessions_can_read_are_sound(record: Record) -> None:
    record.variants["full"].results[0].checks[0].figures = {
        "conditional": [CONDITION, {**CONDITION, "needs": []}]
    }
    assert list(unsound(record)) == []
    assert record.variants["full"].conditions()[0] == CONDITION


def test_the_committed_records_are_sound_and_the_profiles_are_those_of_the_checks() -> None:
    files = sorted((resources.model_audits() / "records").glob("*/*.json"))
    assert len(files) > 20
    for file in files:
        assert list(unsound(load_record(file))) == []
    assert sorted(PROFILES) == sorted(OF_CHECKS)
