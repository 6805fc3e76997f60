"""SARIF 2.1.0: findings that have a file and a line, for code scanning; one run an environment."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any
from urllib.parse import quote

from mlx_audit._version import __version__
from mlx_audit.errors import clean
from mlx_audit.evidence.results import Result, Results
from mlx_audit.reports.documents import Document, gathered
from mlx_audit.reports.findings import Finding, code_of_rule, findings_of
from mlx_audit.reports.rules import rules

SCHEMA = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"
FINGERPRINT = "mlxAuditFinding/v1"
MOST_RESULTS = 5_000
"""Of a run: GitHub shows no more."""

MOST_RUNS = 20
"""Of a file: GitHub takes no more."""

_HOME = "https://github.com/mlx-audit/mlx-audit"
_BASES = {
    "SITE_PACKAGES": "The folder that mlx-lm is installed in, or a checkout of mlx-lm.",
    "WORKING_DIRECTORY": "The folder that mlx-audit was started in.",
}
_SEVERITY = ("error", "warning", "note")


def render(documents: Sequence[Results]) -> str:
    """Return the document.

    A finding is an error where a claim fails by it, a note where it confirms `not-capable` or nothing is claimed, and a
    warning where only configurations reach it that were not audited.
    """
    parts = gathered(documents)
    runs = [_run(document) for document in parts[:MOST_RUNS]]
    if len(parts) > MOST_RUNS:
        _notify(
            runs[0],
            f"{len(parts) - MOST_RUNS:,} more environments were left out: a file holds {MOST_RUNS} runs",
        )
    # A file without a run is refused by code scanning.
    log = {"$schema": SCHEMA, "version": "2.1.0", "runs": runs or [_empty_run()]}
    return json.dumps(log, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def _empty_run() -> dict[str, Any]:
    run = _frame("results", __version__, [])
    _notify(run, "nothing was collected")
    return run


def _run(document: Document) -> dict[str, Any]:
    found, unplaced = findings_of(document.results)
    codes = sorted({code_of_rule(check) for result in document.results for check in result.checks})
    version = clean(document.environment.mlx_audit) or __version__
    run = _frame(document.label, version, list(_rules(codes, document.results)))
    fingerprints = _fingerprints(found)
    shown = sorted(zip(found, fingerprints, strict=True), key=lambda pair: _SEVERITY.index(pair[0].level))
    index = {code: number for number, code in enumerate(codes)}
    run["results"] = [_result(finding, text, index) for finding, text in shown[:MOST_RESULTS]]
    if len(shown) > MOST_RESULTS:
        _notify(run, f"{len(shown) - MOST_RESULTS:,} findings were left out: a run holds {MOST_RESULTS:,}")
    if unplaced:
        _notify(run, f"{unplaced:,} failed checks have no place in a file; the other reports have them")
    return run


def _frame(label: str, version: str, driver_rules: Sequence[dict[str, Any]]) -> dict[str, Any]:
    driver = {"name": "mlx-audit", "version": version, "informationUri": _HOME, "rules": driver_rules}
    return {
        "tool": {"driver": driver},
        "automationDetails": {"id": f"mlx-audit/{quote(label, safe=' ,.')}/"},
        "columnKind": "unicodeCodePoints",
        "originalUriBaseIds": {name: {"description": {"text": text}} for name, text in _BASES.items()},
        "invocations": [{"executionSuccessful": True, "toolExecutionNotifications": []}],
        "results": [],
    }


def _notify(run: dict[str, Any], text: str) -> None:
    run["invocations"][0]["toolExecutionNotifications"].append({"level": "note", "message": {"text": text}})


def _rules(codes: Iterable[str], results: Sequence[Result]) -> Iterator[dict[str, Any]]:
    names = {code_of_rule(check): check.name for result in results for check in result.checks}
    for code in codes:
        rule = rules().get(code)
        if rule is None:  # of another version of mlx-audit
            text = clean(names[code], 500) or code
            yield {"id": code, "shortDescription": {"text": text}, "help": {"text": text}}
            continue
        sections = rule.sections
        yield {
            "id": code,
            "name": rule.symbol,
            "shortDescription": {"text": rule.name},
            "fullDescription": {"text": " ".join(sections.get("What it does", rule.name).split())},
            "help": {"text": rule.page, "markdown": rule.markdown},
            "defaultConfiguration": {"level": "error"},
        }


def _result(finding: Finding, fingerprint: str, index: dict[str, int]) -> dict[str, Any]:
    place = finding.place
    region = {"startLine": place.line} | ({"startColumn": place.column} if place.column else {})
    artifact = {"uri": quote(place.path, safe="/"), "uriBaseId": place.base}
    return {
        "ruleId": finding.code,
        "ruleIndex": index[finding.code],
        "level": finding.level,
        "message": {"text": finding.message},
        "locations": [{"physicalLocation": {"artifactLocation": artifact, "region": region}}],
        "partialFingerprints": {FINGERPRINT: fingerprint},
    }


def _fingerprints(found: Sequence[Finding]) -> list[str]:
    """Return what tells findings apart without their lines: rule, file and source text, and which one of its like."""
    seen: Counter[tuple[str, str, str]] = Counter()
    texts = []
    for finding in found:
        key = (finding.code, finding.place.path, finding.what)
        seen[key] += 1
        digest = hashlib.sha256("\0".join(key).encode()).hexdigest()
        texts.append(f"{digest[:32]}:{seen[key]}")
    return texts
