"""Names and configurations that are markup: every report shows them as text, whatever format it is in."""

from __future__ import annotations

import functools
import json
import re
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from html.parser import HTMLParser
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from markdown_it import MarkdownIt
from markdown_it.token import Token

from fuzz.parsers import results
from mlx_audit.evidence.results import Results
from mlx_audit.evidence.results_file import load_results

MARKS = "<script>alert(1)</script><img src=x onerror=alert(1)>"
PAYLOADS = {
    "tags": MARKS,
    "closing": f"</script></style></pre></code></td></title>-->]]>{MARKS}",
    "quotes": f"\"'><a href=javascript:alert(1) x='{MARKS}",
    "fence": "``````````",
    "tildes": "~~~~~~~~~~",
    "lines": f"a\n\n{MARKS}\n\n```\n# heading\n",
    "links": "[x](javascript:alert(1)) ![x](http://example.org/x.png) <http://example.org> @org/team #1",
    "table": "a | b |\n|---|",
    "terminal": "\x1b[31m\x00\x08\x9b\u202e\u2028\ufffe",
    "template": "{{ 7 * 7 }} {% raw %} ${{ github.token }} %0A::error::x",
    "percent": "%s%n&lt;script&gt;&amp;#x3c;&#60;",
    "composed": "e\u0301 \u00e9 👩‍👩‍👧 \u05d0\u05d1",
}


@functools.cache
def real() -> bytes:
    """Return real results."""
    return results()[0]


def filled(text: str) -> dict[str, Any]:
    """Return results in which every place that holds text holds this one."""
    document: dict[str, Any] = json.loads(real())
    document["environment"] = dict.fromkeys(document["environment"], text)
    result = document["results"][0]
    result |= dict.fromkeys(("target", "family", "variant", "configuration", "reason", "profile"), text)
    result |= {"verdict": "not-capable", "limits": [text], "digests": {text: text}}
    result["claims"] = {"compiled_decode": {"claimed": "capable", "verdict": "not-capable", "reason": text}}
    result["faults"] = {"profile": text, "killed": {text: [text]}, "survived": [text], "unshown": [text]}
    for check, status in zip(result["checks"], ("fail", "not-run", "not-applicable", "pass"), strict=False):
        shown = {"name": text, "reason": text, "where": f"{text}.py:12", "reproduce": text}
        check |= {"status": status, **shown, "figures": {text: text, "a": [text], "error": float("nan")}}
    result["checks"][1]["code"] = text
    return document


@pytest.fixture(params=PAYLOADS)
def document(request: pytest.FixtureRequest, tmp_path: Path) -> Results:
    path = tmp_path / "results.json"
    path.write_text(json.dumps(filled(PAYLOADS[request.param])), encoding="utf-8")
    return load_results(path)


def written(name: str, document: Results) -> str:
    text: str = import_module(f"mlx_audit.reports.{name}").render([document])
    text.encode()
    assert not re.search("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\x80-\x9f\u202a-\u202e\ud800-\udfff]", text)
    return text


class Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)
        for name, value in attrs:
            assert not name.startswith("on"), (tag, name)
            assert not (value or "").strip().lower().startswith(("javascript:", "http:", "https:")), (
                tag,
                value,
            )

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def tags_of(text: str) -> Tags:
    parser = Tags()
    parser.feed(text)
    parser.close()
    return parser


@functools.cache
def plain_tags() -> list[str]:
    """Return the tags of a page of names that are no markup."""
    return tags_of(written("html", Results.model_validate(filled("plain")))).seen


def test_html_has_the_tags_that_it_has_for_plain_names(document: Results) -> None:
    found = tags_of(written("html", document)).seen
    assert set(found) == set(plain_tags())
    assert found.count("script") == plain_tags().count("script")


def tokens(document: Results) -> Iterator[Token]:
    for token in MarkdownIt("gfm-like", {"linkify": False}).parse(written("markdown", document)):
        yield token
        yield from token.children or ()


def test_markdown_has_no_markup_of_names(document: Results) -> None:
    found = list(tokens(document))
    ours = re.compile(r"</?(code|br|details|summary|sub|kbd)( open)?\s*/?>")
    for token in found:
        if token.type in ("html_block", "html_inline"):
            left = ours.sub("", token.content)
            assert "<" not in left, token.content
        assert token.type not in ("link_open", "image"), token
    # Fences are closed by what opened them: whatever comes after is still read as Markdown.
    assert not any(
        "Failed claims" in token.content for token in found if token.type in ("fence", "code_block")
    )


def test_junit_and_sarif_are_well_formed(document: Results) -> None:
    root = ET.fromstring(written("junit", document).encode())
    assert {element.tag for element in root.iter()} <= {
        *("testsuites", "testsuite", "testcase", "failure", "error", "skipped"),
        *("properties", "property", "system-out", "system-err"),
    }

    def constant(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    sarif = json.loads(written("sarif", document), parse_constant=constant)
    for run in sarif["runs"]:
        for result in run["results"]:
            for location in result.get("locations", ()):
                uri = location["physicalLocation"]["artifactLocation"]["uri"]
                assert re.fullmatch(r"[A-Za-z0-9._~!$&'()*+,;=:@%/-]*", uri), uri
                assert not uri.startswith(("/", "javascript:")), uri
                assert ".." not in uri.split("/"), uri
