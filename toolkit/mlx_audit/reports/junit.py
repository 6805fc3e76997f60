"""JUnit XML: a suite a variant, a test case a check; all cases pass exactly when the audit's exit code is 0."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from xml.etree import ElementTree

from mlx_audit.audit.exit_codes import is_binding
from mlx_audit.audit.failure_text import failure_lines
from mlx_audit.audit.items import VERDICT, note_of
from mlx_audit.errors import clean
from mlx_audit.evidence.results import CheckResult, Result, Results
from mlx_audit.reports.documents import (
    STANDINGS,
    Document,
    claims_of,
    figure_text,
    gathered,
    known_environment,
    own_figures,
    standing_of,
)

_ILLEGAL = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""What no XML document can hold, escaped or not."""

_MOST_SECONDS = 1e9
_COUNTED = ("failure", "error", "skipped")


def render(documents: Sequence[Results]) -> str:
    """Return the document.

    A check that failed is a failure where the claim needs it to pass. The case `verdict` of each configuration is a
    failure where a claim fails, and an error where it cannot be decided.
    """
    root = ElementTree.Element("testsuites", name="mlx-audit")
    for document in gathered(documents):
        for results in _by_variant(document.results):
            root.append(_suite(document, results))
    totals = {
        name: sum(int(suite.attrib[name]) for suite in root) for name in ("tests", "failures", "errors")
    }
    root.attrib.update({name: str(count) for name, count in totals.items()})
    ElementTree.indent(root, " ")
    text = ElementTree.tostring(root, encoding="unicode")
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{text}\n'


def _by_variant(results: Iterable[Result]) -> list[list[Result]]:
    groups: dict[tuple[str, str], list[Result]] = {}
    for result in results:
        groups.setdefault((result.family, result.variant), []).append(result)
    return list(groups.values())


def _suite(document: Document, results: Sequence[Result]) -> ElementTree.Element:
    first = results[0]
    suite = ElementTree.Element(
        "testsuite", name=_legal(f"{first.family}::{first.variant} ({document.label})")
    )
    _add_properties(suite, [*known_environment(document.environment), *_figures(results)])
    for result in results:
        suite.extend(_cases(document.label, result))
    cases = suite.findall("testcase")
    failures, errors, skipped = (sum(case.find(tag) is not None for case in cases) for tag in _COUNTED)
    counts = {"tests": len(cases), "failures": failures, "errors": errors, "skipped": skipped}
    suite.attrib.update({name: str(count) for name, count in counts.items()})
    if time := _time(sum(result.seconds for result in results)):
        suite.set("time", time)
    return suite


def _add_properties(suite: ElementTree.Element, properties: Iterable[tuple[str, str]]) -> None:
    """Add properties to a suite: the common schema has no place for them in a case."""
    parent = ElementTree.SubElement(suite, "properties")
    for name, value in properties:
        ElementTree.SubElement(parent, "property", name=_legal(name), value=_legal(value))


def _figures(results: Iterable[Result]) -> Iterator[tuple[str, str]]:
    for result in results:
        for check in result.checks:
            if "on" not in check.figures:
                for name, value in own_figures(check).items():
                    yield f"{result.configuration}::{check.code}::{name}", figure_text(value, 1_000)


def _cases(label: str, result: Result) -> Iterator[ElementTree.Element]:
    # Readers take what follows the last dot for the name of a class.
    names = (label, result.family, result.variant, result.configuration)
    classname = _legal(".".join(name.replace(".", "_") for name in names))
    for check in result.checks:
        case = ElementTree.Element("testcase", classname=classname, name=_legal(check.code))
        _fill(case, check, result)
        yield case
    verdict = ElementTree.Element("testcase", classname=classname, name=VERDICT)
    if time := _time(result.seconds):
        verdict.set("time", time)
    _fill_verdict(verdict, result)
    yield verdict


def _fill(case: ElementTree.Element, check: CheckResult, result: Result) -> None:
    """Say what became of a check; one that passed needs no word."""
    if check.status in ("not-run", "not-applicable"):
        words = {"not-run": "not run", "not-applicable": "not applicable"}
        ElementTree.SubElement(case, "skipped", message=_legal(f"{words[check.status]}: {check.reason}"))
    elif check.status == "fail" and is_binding(result, check.code):
        text = "\n".join(line for line, _ in failure_lines(check))
        _add_outcome(case, "failure", check.reason, check.code, text)
    elif check.status == "fail":
        only = result.model_copy(update={"checks": [check]})
        _add_output(case, note_of(check.code, [only]) or check.reason)


def _fill_verdict(case: ElementTree.Element, result: Result) -> None:
    found = [(standing_of(result, claim, name), name, claim) for name, claim in claims_of(result).items()]
    found.sort(key=lambda item: STANDINGS.index(item[0]))
    standing = found[0][0]
    lines = [
        clean(f"{name}: claimed {claim.claimed or 'nothing'}, found {claim.verdict} ({how}): {claim.reason}")
        for how, name, claim in found
    ]
    if standing == "in part":
        ElementTree.SubElement(case, "skipped", message=_legal("; ".join(lines)))
    elif standing in ("fails", "undecided"):
        tag = "failure" if standing == "fails" else "error"
        _add_outcome(case, tag, lines[0], standing, "\n".join(lines))
    else:
        _add_output(case, "\n".join(lines))


def _add_outcome(case: ElementTree.Element, tag: str, message: str, kind: str, text: str) -> None:
    element = ElementTree.SubElement(case, tag, message=_legal(message), type=_legal(kind))
    element.text = _legal_lines(text)


def _add_output(case: ElementTree.Element, text: str) -> None:
    ElementTree.SubElement(case, "system-out").text = _legal_lines(text)


def _legal(text: str) -> str:
    """Return one line that XML can hold."""
    return _ILLEGAL.sub("\ufffd", clean(text))


def _legal_lines(text: str) -> str:
    return "\n".join(map(_legal, text.split("\n")))


def _time(seconds: float) -> str | None:
    """Return a time as the schema has it, or None where none was kept."""
    usable = math.isfinite(seconds) and 0 < seconds < _MOST_SECONDS
    return f"{seconds:.3f}" if usable else None
