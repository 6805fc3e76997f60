"""Reading what `--json` wrote: a file of anybody's."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mlx_audit.evidence import results_file
from mlx_audit.evidence.results_file import ResultsError, load_results
from report_documents import audited, document, failed, result


def write(folder: Path, change: Callable[[dict[str, Any]], None] = lambda data: None) -> Path:
    """Write a document of a claim that holds and one that fails, changed."""
    data = json.loads(document(result(*audited()), result(failed())).to_json())
    change(data)
    path = folder / "results.json"
    path.write_text(json.dumps(data), encoding="utf-8")
    return path


def refused(path: Path) -> ResultsError:
    with pytest.raises(ResultsError) as caught:
        load_results(path)
    return caught.value


def test_what_was_written_is_read(tmp_path: Path) -> None:
    assert [found.verdict for found in load_results(write(tmp_path)).results] == ["capable", "not-capable"]


def capable(data: dict[str, Any], *keys: str) -> None:
    target = data["results"][1]
    for key in keys:
        target = target[key]
    target["verdict"] = "capable"


def claims(data: dict[str, Any], name: str, verdict: str) -> None:
    data["results"][0]["claims"] = {name: {"claimed": "capable", "verdict": verdict, "reason": ""}}


@pytest.mark.parametrize(
    ("change", "where"),
    [
        (capable, "results.1.verdict"),
        (lambda data: capable(data, "claims", "compiled_decode"), "results.1.claims.compiled_decode.verdict"),
        (lambda data: data["results"][0].update(checks=[]), "results.0.verdict"),
        (lambda data: data["results"][0]["checks"][0].update(status="not-run"), "results.0.verdict"),
        (lambda data: data["results"][0].update(verdict="limited", checks=[]), "results.0.verdict"),
        (lambda data: data["results"][0].update(verdict="limited"), "results.0.verdict"),
        (lambda data: data["results"][0].update(limits=["text only"]), "results.0.verdict"),
        (lambda data: data["results"][0]["checks"].pop(), "results.0.verdict"),
        (
            lambda data: data["results"][0]["checks"][0].update(tier="checkpoint", status="not-run"),
            "results.0.verdict",
        ),
        (lambda data: claims(data, "prefix_restore", "capable"), "results.0.claims.prefix_restore.verdict"),
        (lambda data: claims(data, "rope.yarn", "capable"), "results.0.claims.rope.yarn.verdict"),
        (lambda data: data["results"][0].update(verdict="not-capable"), "results.0.verdict"),
    ],
    ids=[
        *("verdict", "claim", "no checks", "not run", "limited", "no limits", "limits"),
        *("lacks one", "hidden tier", "restore", "unknown claim", "nothing failed"),
    ],
)
def test_a_verdict_that_its_checks_do_not_bear_out(change: Any, where: str, tmp_path: Path) -> None:
    error = refused(write(tmp_path, change))
    assert "does not follow from the checks" in error.what
    assert str(error.where).endswith(where)


def test_what_could_not_be_loaded_is_not_capable_without_a_check(tmp_path: Path) -> None:
    def change(data: dict[str, Any]) -> None:
        data["results"][1]["checks"] = []

    assert load_results(write(tmp_path, change)).results[1].verdict == "not-capable"


def test_no_file_and_a_large_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "no such results file" in refused(tmp_path / "missing.json").what
    assert "no such results file" in refused(tmp_path).what
    monkeypatch.setattr(results_file, "_MOST_BYTES", 100)
    assert "too large" in refused(write(tmp_path)).what


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda data: data.update(schema="mlx-audit/results/2"), "another format"),
        (lambda data: data.update(more=1), "form of its schema"),
        (lambda data: data["results"][0].update(verdict="perfect"), "form of its schema"),
        (lambda data: data["results"][0].update(claims=7), "form of its schema"),
    ],
    ids=["version", "key", "word", "type"],
)
def test_another_form(change: Any, what: str, tmp_path: Path) -> None:
    assert what in refused(write(tmp_path, change)).what
