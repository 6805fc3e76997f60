"""SARIF, checked by the official schema, and by what code scanning takes."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft4Validator

from command import mlx_audit
from mlx_audit.checks.base import all_checks
from mlx_audit.evidence.results import Result, Results
from mlx_audit.evidence.results_file import load_results
from mlx_audit.reports import sarif
from mlx_audit.reports.rules import rules
from mlx_audit.reports.sarif import FINGERPRINT, MOST_RESULTS, MOST_RUNS, render
from model_files import FORWARD, write_config, write_model
from report_documents import check, document, failed, hostile_document, recorded, result

SCHEMA = Path(__file__).parent / "schemas" / "sarif-schema-2.1.0.json"
HARM = "        int(cache[0].offset)\n"


@functools.cache
def validator() -> Draft4Validator:
    schema = json.loads(SCHEMA.read_text(encoding="utf-8"))
    return Draft4Validator(schema, format_checker=Draft4Validator.FORMAT_CHECKER)


def runs(documents: Sequence[Results]) -> list[dict[str, Any]]:
    """Render, validate, and return the runs."""
    text = render(documents)
    assert text.endswith("}\n")
    log = json.loads(text)
    assert [error.message for error in validator().iter_errors(log)] == []
    for run in log["runs"]:
        ids = [rule["id"] for rule in run["tool"]["driver"]["rules"]]
        assert len(set(ids)) == len(ids)
        for found in run["results"]:
            assert ids[found["ruleIndex"]] == found["ruleId"]
            uri = found["locations"][0]["physicalLocation"]["artifactLocation"]["uri"]
            assert not uri.startswith("/")
            assert ":" not in uri
            assert ".." not in uri.split("/")
    return log["runs"]


def results(*found: Result) -> list[dict[str, Any]]:
    """Return the findings of one document."""
    (run,) = runs([document(*found)])
    return run["results"]


def place(found: dict[str, Any]) -> tuple[str, str, int, int | None]:
    location = found["locations"][0]["physicalLocation"]
    artifact, region = location["artifactLocation"], location["region"]
    return artifact["uriBaseId"], artifact["uri"], region["startLine"], region.get("startColumn")


def notes(run: dict[str, Any]) -> list[str]:
    return [note["message"]["text"] for note in run["invocations"][0]["toolExecutionNotifications"]]


def conditional(line: int = 20) -> dict[str, Any]:
    what = f"mlx_lm/models/rope.py:{line}:3 branch: `if offset` reads the position"
    return {"conditional": [{"what": what, "needs": ["x.Y"], "when": "rope_type == 'dynamic'"}]}


@pytest.fixture(scope="module")
def harmful(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that reads the position on the host, and after it the same with lines before the place."""
    folder = tmp_path_factory.mktemp("harmful")
    write_config(folder)
    write_model(folder, "my_model", (FORWARD, HARM + FORWARD))
    return folder


def audited(folder: Path) -> Results:
    """Audit the model's source from its folder."""
    file = folder / "out.json"
    done = mlx_audit(
        "run", "my_model.py", "--config", "config.json", "--tier", "static", "--json", file, cwd=folder
    )
    assert done.returncode == 1, done.stderr
    return load_results(file)


def test_a_real_hazard_is_at_its_line_and_keeps_its_fingerprint_when_it_moves(harmful: Path) -> None:
    file = harmful / "my_model.py"
    before = runs([audited(harmful)])[0]["results"]
    first = next(found for found in before if found["ruleId"] == "SRC001")
    base, uri, line, column = place(first)
    assert (base, uri, first["level"]) == ("WORKING_DIRECTORY", "my_model.py", "error")
    source = file.read_text(encoding="utf-8")
    assert column is not None
    assert source.splitlines()[line - 1][column - 1 :].startswith("int(cache[0].offset)")
    assert "int(cache[0].offset)" in first["message"]["text"]

    file.write_text("# one\n# two\n# three\n" + source, encoding="utf-8")
    after = runs([audited(harmful)])[0]["results"]
    file.write_text(source, encoding="utf-8")
    assert [place(found)[2] - 3 for found in after] == [place(found)[2] for found in before]
    assert [f["partialFingerprints"] for f in after] == [f["partialFingerprints"] for f in before]


def test_findings_of_other_texts_files_and_checks_have_other_fingerprints() -> None:
    found = results(
        result(failed()),
        result(failed(where="mlx_lm/models/other.py:12:5")),
        result(failed(where="mlx_lm/models/bad.py:30:5", reason="another")),
        result(failed("SRC002")),
        result(failed(where="mlx_lm/models/bad.py:40:5")),  # the same text again, further down
    )
    assert len({item["partialFingerprints"][FINGERPRINT] for item in found}) == 5


@pytest.mark.parametrize(
    ("claimed", "level"),
    [
        ("capable", "error"),
        ("limited", "error"),
        (None, "error"),
        ("not-capable", "note"),
        ("undecided", "note"),
    ],
)
def test_the_level_says_what_the_claim_makes_of_it(claimed: Any, level: str) -> None:
    (found,) = results(result(failed(), claimed=claimed))
    assert (found["level"], found["ruleId"]) == (level, "SRC001")
    assert place(found) == ("SITE_PACKAGES", "mlx_lm/models/bad.py", 12, 5)
    assert found["message"]["text"] == "`int(offset)` reads the position. Found in bad full (tiny)."


def test_what_others_reach_is_a_warning_with_its_condition() -> None:
    (found,) = results(result(check("SRC001", figures=conditional())))
    assert (found["level"], place(found)[1:3]) == ("warning", ("mlx_lm/models/rope.py", 20))
    assert "when rope_type == 'dynamic'" in found["message"]["text"]


def test_one_place_is_one_finding_at_its_worst_level() -> None:
    where = "mlx_lm/models/rope.py:20:3"
    (found,) = results(
        result(check("SRC001", figures=conditional())),
        result(failed(where=where, reason="`if offset` reads the position"), claimed="undecided"),
        result(failed(where=where, reason="`if offset` reads the position"), configuration="a"),
        result(failed(where=where, reason="`if offset` reads the position"), configuration="b"),
    )
    assert found["level"] == "error"
    assert found["message"]["text"].endswith("Found in bad full (a and 1 more).")
    (alone,) = results(result(check("SRC001", figures=conditional())))
    assert alone["partialFingerprints"] == found["partialFingerprints"]


def test_all_places_of_a_hazard_are_told() -> None:
    more = ["mlx_lm/models/bad.py:14:7 arange bound: `mx.arange(offset)` reads the position", "no place"]
    found = results(result(failed(figures={"more_places": more})))
    assert [place(item)[2:] for item in found] == [(12, 5), (14, 7)]
    assert found[1]["message"]["text"].startswith("`mx.arange(offset)` reads")


def test_the_place_of_a_trace_is_read_off_its_reason() -> None:
    reason = "mlx_lm/models/bad.py:150: the forward reads a value on the host"
    (found,) = results(result(failed("TRC001", where=None, reason=reason)))
    assert place(found) == ("SITE_PACKAGES", "mlx_lm/models/bad.py", 150, None)
    assert found["message"]["text"].startswith("the forward reads")


@pytest.mark.parametrize(
    ("where", "target", "uri"),
    [
        ("/venv/lib/site-packages/mlx_lm/models/x.py:1:2", "x", "mlx_lm/models/x.py"),
        ("/home/someone/secret/x.py:1:2", "x", "x.py"),
        ("../../x.py:1:2", "x", "x.py"),
        (r"C:\Users\someone\x.py:1:2", "x", "x.py"),
        ("x.py:1:2", "models/x.py", "models/x.py"),
        ("x.py:1:2", "/home/someone/x.py", "x.py"),
        ("x.py:1:2", "models/y.py", "x.py"),
        ("my model #1?.py:1:2", "x", "my%20model%20%231%3F.py"),
        ("é.py:1:2", "x", "%C3%A9.py"),
    ],
)
def test_paths_are_relative(where: str, target: str, uri: str) -> None:
    (found,) = results(result(failed(where=where), target=target))
    assert place(found)[1:] == (uri, 1, 2)


def test_a_file_of_the_working_directory_is_relative_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (found,) = results(result(failed(where=f"{Path.cwd()}/sub/x.py:1:2")))
    assert place(found)[:2] == ("WORKING_DIRECTORY", "sub/x.py")


@pytest.mark.parametrize(
    "where", [None, "step 3, caches[1]", "x.py:0:1", "x.py", "x.py:99999999999999999999"]
)
def test_a_failure_without_a_place_is_counted(where: str | None) -> None:
    (run,) = runs([document(result(failed("PAR001", where=where, reason="logits differ"), check("SRC001")))])
    assert run["results"] == []
    assert notes(run) == ["1 failed checks have no place in a file; the other reports have them"]


def test_no_more_than_code_scanning_takes_and_errors_first(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (MOST_RESULTS, MOST_RUNS) == (5_000, 20)
    monkeypatch.setattr(sarif, "MOST_RESULTS", 50)
    many = [failed(where=f"mlx_lm/models/bad.py:{line}:1") for line in range(1, 61)]
    worst = failed("SRC002", where="mlx_lm/models/zzz.py:1:1")
    (run,) = runs([document(*(result(one, claimed="not-capable") for one in many), result(worst))])
    assert len(run["results"]) == 50
    assert (run["results"][0]["level"], place(run["results"][0])[1]) == ("error", "mlx_lm/models/zzz.py")
    assert notes(run) == ["11 findings were left out: a run holds 50"]


def test_environments_are_runs_and_no_more_than_are_taken() -> None:
    documents = [document(result(failed()), mlx=f"0.{number}") for number in range(MOST_RUNS + 5)]
    found = runs(documents)
    assert len(found) == MOST_RUNS
    assert len({run["automationDetails"]["id"] for run in found}) == MOST_RUNS
    assert notes(found[0])[0].startswith("5 more environments were left out")


def test_rules_are_what_explain_says() -> None:
    assert {code: rule.page for code, rule in rules().items()} == {c.code: c.page for c in all_checks()}
    (run,) = runs([document(result(failed(), check("PAR001"), check("OLD999", name="gone")))])
    old, greedy, position = run["tool"]["driver"]["rules"]
    assert (old["id"], old["help"]["text"]) == ("OLD999", "gone")
    assert greedy["id"] == "PAR001"
    assert (position["id"], position["name"]) == ("SRC001", "PositionStaysOnDevice")
    assert position["shortDescription"]["text"].startswith("The position of the cache")
    assert "**How to fix**" in position["help"]["markdown"]


def test_a_link_in_a_message_is_none() -> None:
    (found,) = results(result(failed(reason="see [this](https://evil.example)")))
    assert "](" not in found["message"]["text"]


def test_nothing_and_a_dead_child() -> None:
    for documents in ([], [document()], [document(result(verdict="not-capable"))]):
        (run,) = runs(documents)
        assert run["results"] == []


def test_the_committed_records() -> None:
    found = runs(recorded())
    assert len(found) == len({part.environment.backend for part in recorded()})
    assert any(item["level"] == "warning" for run in found for item in run["results"])
    assert render(recorded()) == render(recorded())


CONDITION = ("SITE_PACKAGES", "mlx_lm/models/x.py", 3, 4)


def test_hostile_text() -> None:
    (run,) = runs([hostile_document()])
    assert CONDITION in map(place, run["results"])
    assert "\x1b" not in render([hostile_document()])


@settings(max_examples=40)
@given(st.text(max_size=40))
def test_any_text(text: str) -> None:
    (run,) = runs([hostile_document([text])])
    assert CONDITION in map(place, run["results"])
