"""JUnit XML, read by the parsers and checked by the schema that readers use."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from pathlib import Path

import pytest
import xmlschema
from hypothesis import given, settings
from hypothesis import strategies as st
from junitparser import JUnitXml, TestSuite

from mlx_audit.audit.exit_codes import HOLDS, NOTHING, code_of, combine
from mlx_audit.evidence.results import CheckResult, Result, Results
from mlx_audit.reports.junit import render
from report_documents import HOSTILE, check, document, failed, hostile_document, recorded, result

SCHEMA = Path(__file__).parent / "schemas" / "junit-10.xsd"


@functools.cache
def schema() -> xmlschema.XMLSchema:
    return xmlschema.XMLSchema(SCHEMA)


def parsed(documents: Sequence[Results]) -> JUnitXml:
    """Render, validate, and read."""
    text = render(documents)
    assert [error.reason for error in schema().iter_errors(text)] == []
    return JUnitXml.fromstring(text.encode())


def cases(xml: JUnitXml) -> dict[tuple[str, str], str]:
    """Return what became of each case, by class and name: `passed`, or the tags of its results."""
    return {
        (case.classname, case.name): ",".join(found._tag for found in case.result) or "passed"
        for suite in xml
        for case in suite
    }


def wrong(xml: JUnitXml) -> int:
    return xml.failures + xml.errors


@pytest.mark.parametrize(
    ("found", "outcome"),
    [
        (result(check()), {"PAR001": "passed", "verdict": "passed"}),
        (result(failed()), {"SRC001": "failure", "verdict": "failure"}),
        (result(failed(), claimed=None), {"SRC001": "failure", "verdict": "failure"}),
        # What confirms a claim is no failure.
        (result(failed(), claimed="not-capable"), {"SRC001": "passed", "verdict": "passed"}),
        (result(failed(), claimed="undecided"), {"SRC001": "passed", "verdict": "passed"}),
        (result(check(), claimed="not-capable"), {"PAR001": "passed", "verdict": "failure"}),
        (result(check(status="not-run", reason="why")), {"PAR001": "skipped", "verdict": "error"}),
        (
            result(check(), check("MSK005", "not-applicable", reason="why")),
            {"PAR001": "passed", "MSK005": "skipped", "verdict": "passed"},
        ),
        # A child that died has no checks.
        (result(claimed="capable"), {"verdict": "error"}),
        (result(verdict="not-capable"), {"verdict": "failure"}),
    ],
)
def test_each_outcome(found: Result, outcome: dict[str, str]) -> None:
    assert {name: what for (_, name), what in cases(parsed([document(found)])).items()} == outcome


def test_a_partial_audit_proves_nothing_and_fails_nothing() -> None:
    reason = "partial: only some tiers or checks were selected"
    claims = {"compiled_decode": {"claimed": "capable", "verdict": "undecided", "reason": reason}}
    found = result(check(), verdict="undecided", reason=reason, claims=claims)
    assert cases(parsed([document(found)]))["cpu.bad.full.tiny", "verdict"] == "skipped"


@pytest.mark.parametrize("claimed", ["capable", "limited", "not-capable", "undecided", None])
def test_there_is_a_failure_exactly_where_the_exit_code_says_so(claimed: str | None) -> None:
    statuses = ("pass", "fail", "not-run", "not-applicable")
    for pair in itertools.product(statuses, repeat=2):
        found = result(check("SRC001", pair[0]), check("PAR001", pair[1]), claimed=claimed)
        xml = parsed([document(found)])
        assert (wrong(xml) == 0) == (combine([code_of(found)]) in (HOLDS, NOTHING)), (claimed, pair)
        assert (xml.failures > 0) == (code_of(found) == 1), (claimed, pair)


def test_a_failure_says_what_a_person_needs() -> None:
    xml = parsed([document(result(failed(reproduce="mlx-audit run bad --only SRC001")))])
    (suite,) = xml
    (failure,) = next(case for case in suite if case.name == "SRC001").result
    assert failure.type == "SRC001"
    assert failure.message == "`int(offset)` reads the position"
    for piece in (
        "what must hold",
        "at mlx_lm/models/bad.py:12:5",
        "reproduce: mlx-audit run bad --only SRC001",
    ):
        assert piece in failure.text


def test_what_confirms_a_claim_is_told() -> None:
    (suite,) = parsed([document(result(failed(), claimed="not-capable"))])
    said = {case.name: case.system_out for case in suite}
    assert "where the claim is not-capable" in said["SRC001"]
    assert "claimed not-capable, found not-capable (holds)" in said["verdict"]


def test_figures_and_versions_are_properties() -> None:
    found = result(check(figures={"max_difference": 0.1 + 0.2, "steps": 6, "conditional": [1]}))
    (suite,) = parsed([document(found)])
    properties = {item.name: item.value for item in suite.properties()}
    assert properties["mlx"] == "0.32.4"
    assert properties["tiny::PAR001::max_difference"] == "0.3"
    assert properties["tiny::PAR001::steps"] == "6"
    assert not any("conditional" in name for name in properties)


def test_suites_and_names_are_stable() -> None:
    one, other = result(check()), result(check(), variant="sliding", configuration="org--Model-3.2")
    xml = parsed([document(one, other), document(one, backend="cuda")])
    assert [suite.name for suite in xml] == ["bad::full (cpu)", "bad::sliding (cpu)", "bad::full (cuda)"]
    # A dot would be taken for the edge of a package.
    assert ("cpu.bad.sliding.org--Model-3_2", "PAR001") in cases(xml)
    assert ("cuda.bad.full.tiny", "verdict") in cases(xml)


def test_environments_that_share_a_backend_are_told_apart() -> None:
    one = result(check())
    xml = parsed([document(one), document(one, mlx="0.33.0"), document(one)])
    assert [(suite.name, suite.tests) for suite in xml] == [
        ("bad::full (cpu, mlx 0.32.4)", 4),
        ("bad::full (cpu, mlx 0.33.0)", 2),
    ]


def test_times_are_given_where_they_are_known() -> None:
    (known,) = parsed([document(result(check(), seconds=1.25))])
    assert known.time == 1.25
    for seconds in (0.0, -1.0, 1e300, float("nan"), float("inf")):
        assert "time=" not in render([document(result(check(), seconds=seconds))])


def test_nothing_is_a_document_too() -> None:
    for documents in ([], [document()]):
        xml = parsed(documents)
        assert (list(xml), xml.tests, wrong(xml)) == ([], 0, 0)


def test_the_committed_records() -> None:
    documents = recorded()
    results = [found for part in documents for found in part.results]
    xml = JUnitXml.fromstring(render(documents).encode())
    found = cases(xml)
    assert len(found) == xml.tests == sum(len(r.checks) + 1 for r in results), "a name is not unique"
    assert {name for _, name in found} >= {"SRC001", "PAR001", "verdict"}
    assert (wrong(xml) == 0) == (combine(map(code_of, results)) == HOLDS)
    # A part of it, for the schema is checked slowly.
    part = [r for r in results if r.family in ("llama4", "mamba2")]
    assert len({r.verdict for r in part}) == 2
    parsed([document(*part)])


def test_hostile_text() -> None:
    xml = parsed([hostile_document()])
    assert xml.tests == 4 * len(HOSTILE)
    assert not any(case.name == "forged" for suite in xml for case in suite)
    assert "\x1b" not in render([hostile_document()])


@settings(max_examples=40)
@given(st.text(max_size=40))
def test_any_text(text: str) -> None:
    xml = parsed([hostile_document([text])])
    suites: list[TestSuite] = list(xml)
    assert (len(suites), xml.tests) == (1, 4)


def test_thousands_of_results() -> None:
    many = [result(check(), failed(), configuration=f"c{number}") for number in range(3_000)]
    xml = JUnitXml.fromstring(render([document(*many)]).encode())
    assert (xml.tests, xml.failures) == (9_000, 6_000)


def test_a_check_without_a_reason() -> None:
    found = CheckResult(code="PAR001", name="n", tier="numeric", status="fail")
    assert parsed([document(result(found))]).failures == 2
