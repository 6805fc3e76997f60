"""The HTML page as text: what the board says, that nothing in it can run or ask the network, and its size."""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import math
import re
import time
from html.parser import HTMLParser
from typing import Any

import pytest

from mlx_audit import resources
from mlx_audit.evidence.results import ClaimResult, KillSummary, Results
from mlx_audit.reports.html import render
from mlx_audit.reports.html_board import Line, lines_of, places_and_blocks
from mlx_audit.reports.html_data import plain
from pages import check, document, environment, hostile_document, result, varied


class Page(HTMLParser):
    """The elements of a page, its texts, and the contents of its styles and scripts."""

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.raw: dict[str, list[str]] = {"style": [], "script": []}
        self.text = ""
        self._inside = ""
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag in self.raw:
            self._inside = tag
            self.raw[tag].append("")

    def handle_endtag(self, tag: str) -> None:
        if tag == self._inside:
            self._inside = ""

    def handle_data(self, data: str) -> None:
        if self._inside:
            self.raw[self._inside][-1] += data
        else:
            self.text += data

    def data(self) -> Any:
        """What the page's script unpacks."""
        text = gzip.decompress(base64.b64decode(self.raw["script"][0]))
        return json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))


def lines(*documents: Results) -> list[Line]:
    places, blocks = places_and_blocks(documents)
    return [line for block in blocks for line in lines_of(block, places)]


def line(*documents: Results) -> Line:
    (only,) = lines(*documents)
    return only


def test_the_weakest_configuration_decides() -> None:
    failing = check("TRC001", "fail", name="one graph", reason="two graphs")
    broken = result(
        verdict="not-capable",
        configuration="tiny+yarn",
        checks=[check(), failing],
        claims={
            "compiled_decode": ClaimResult(
                claimed="capable", verdict="not-capable", reason="TRC001 one graph: two graphs"
            )
        },
    )
    found = line(document(result(), broken))
    assert (found.verdict, found.claimed, found.standing) == ("not-capable", "capable", "fails")
    assert (found.code, found.why) == ("TRC001", "one graph: two graphs")
    assert "tiny+yarn" in found.also


def test_one_line_a_claim_and_backend() -> None:
    two = {
        name: ClaimResult(claimed="capable", verdict="capable")
        for name in ("compiled_decode", "prefix_restore")
    }
    found = lines(document(result(claims=two)), document(result(claims=two), backend="cuda"))
    assert [(one.claim, one.label) for one in found] == [
        ("compiled decode", "cpu"),
        ("prefix restore", "cpu"),
        ("compiled decode", "cuda"),
        ("prefix restore", "cuda"),
    ]


def test_jobs_of_one_environment_are_one_place_and_others_are_told_apart() -> None:
    found = lines(
        document(result("a")),
        document(result("b")),
        document(result("a"), python="3.11.0"),
        document(result("c")),
    )
    assert len(found) == 4
    assert len({one.label for one in found}) == 2
    assert {one.backend for one in found} == {"cpu"}, "the filter is by backend"


@pytest.mark.parametrize(
    ("verdict", "claimed", "standing"),
    [
        ("capable", "capable", "holds"),
        ("not-capable", "not-capable", "holds"),
        ("capable", "not-capable", "fails"),
        ("not-capable", "limited", "fails"),
        ("undecided", "capable", "undecided"),
        ("not-capable", "undecided", "claims nothing"),
        ("not-capable", None, "fails"),
    ],
)
def test_where_a_claim_stands(verdict: Any, claimed: Any, standing: str) -> None:
    page = Page(render([document(result(verdict=verdict, claimed=claimed))]))
    assert line(document(result(verdict=verdict, claimed=claimed))).standing == standing
    assert ("1 of 1 claim fails." in page.text) == (standing == "fails")
    assert ("The claim holds." in page.text) == (standing == "holds")
    assert ("cannot be decided." in page.text) == (standing == "undecided")
    assert ("Nothing is claimed here." in page.text) == (standing == "claims nothing")


def test_what_nothing_is_claimed_of_does_not_lower_the_variant() -> None:
    dynamic = result(verdict="not-capable", claimed="undecided", configuration="tiny+dynamic")
    own, other = lines(document(dynamic, result()))
    assert (own.verdict, own.only) == ("capable", "")
    assert (other.verdict, other.claimed, other.only) == ("not-capable", "undecided", "tiny+dynamic")
    page = Page(render([document(dynamic, result())]))
    assert "The claim holds." in page.text
    assert "families, in every variant" not in page.text
    assert page.data()["families"]["llama"][0]["claims"][0][3] == "capable"


def test_limits_are_named() -> None:
    found = line(document(result(verdict="limited", claimed="limited", limits=["Text only.", "No images."])))
    assert found.why == "Text only. No images."


def test_a_record_that_lapsed_says_why_and_names_no_check() -> None:
    reason = "stale: recorded with mlx 0.31, installed is 0.32"
    claims = {"compiled_decode": ClaimResult(claimed="capable", verdict="undecided", reason=reason)}
    own = result(
        verdict="undecided", checks=[check("MSK001", "not-run", reason="x")], claims=claims, reason=reason
    )
    found = line(document(own))
    assert (found.verdict, found.code, found.why) == ("undecided", "", reason)


@pytest.mark.parametrize(
    ("needed", "shown"),
    [
        ([0.0, 0.0], "bit-equal"),
        ([0.0, 1.61e-6], "≤ 1.7e−6"),
        ([9.99e-5], "≤ 1.0e−4"),
        ([2e-6], "≤ 2.0e−6"),
        ([], ""),
        ([math.inf], ""),
        (["much"], ""),
    ],
)
def test_the_difference_is_a_bound(needed: list[Any], shown: str) -> None:
    results = [
        result(
            configuration=f"tiny {number}",
            checks=[check(figures={"float32": {"minimum_tolerance": value, "class": "reordered"}})],
        )
        for number, value in enumerate(needed)
    ]
    found = line(document(*(results or [result()])))
    assert found.exactness == shown
    assert found.exactness_class == ("reordered" if shown else "")


def test_a_failed_comparison_gives_no_difference() -> None:
    failed = check(status="fail", figures={"float32": {"minimum_tolerance": 0.0, "class": "exact"}})
    assert line(document(result(checks=[failed]))).exactness == ""


def test_faults_that_survive_are_counted() -> None:
    faults = KillSummary(profile="ci", killed={"A": ["a", "b"], "B": ["c"]}, survived=["d"], unshown=["e"])
    found = line(document(result(faults=faults)))
    assert (found.kills, found.survived) == ("3 / 4", 1)
    assert "1 not seen" in Page(render([document(result(faults=faults))])).text


def test_every_check_of_every_result_is_in_the_page(recorded: list[Results], recorded_page: str) -> None:
    data = Page(recorded_page).data()
    seen = set()
    for family, blocks in data["families"].items():
        for block in blocks:
            for configuration, _, _, indices, *_ in block["results"]:
                for index in indices:
                    name, status, *_ = data["checks"][index]
                    seen.add(
                        (
                            family,
                            block["variant"],
                            data["places"][block["place"]],
                            configuration,
                            data["names"][name][0],
                            status,
                        )
                    )
    wanted = {
        (own.family, own.variant, one.environment.backend, own.configuration, found.code, found.status)
        for one in recorded
        for own in one.results
        for found in own.checks
    }
    assert seen == wanted
    assert len(wanted) > 5_000


def test_the_board_has_every_variant_without_any_script(recorded: list[Results], recorded_page: str) -> None:
    page = Page(recorded_page)
    shown = [attributes for tag, attributes in page.elements if tag == "tr" and "data-verdict" in attributes]
    variants = {
        (own.family, own.variant, one.environment.backend, claim)
        for one in recorded
        for own in one.results
        for claim in own.claims
    }
    assert len(shown) == len(variants)
    assert all(family in page.text for family, *_ in variants)


def test_hostile_texts_stay_texts() -> None:
    page = Page(render([hostile_document()]))
    ours = Page(render([document(result())]))
    assert {tag for tag, _ in page.elements} <= {tag for tag, _ in ours.elements} | {
        "ul",
        "li",
        "strong",
        "dt",
        "dd",
        "dl",
    }
    assert len(page.raw["script"]) == 2
    assert page.raw["script"][1] == ours.raw["script"][1]
    names = {name for _, attributes in page.elements for name in attributes}
    assert not {name for name in names if name.startswith("on") or name in ("style", "autofocus")}
    links = [attributes["href"] for tag, attributes in page.elements if tag == "a"]
    assert links
    assert all(re.fullmatch(r"#[A-Za-z0-9_.-]+", link or "") for link in links)
    assert "alert(1)" in page.text, "it is shown"
    assert "49" not in page.text.replace("}}", ""), "and not computed"
    unsafe = re.compile("[\x00-\x08\x0b\x0e-\x1f\x7f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
    assert not unsafe.search(page.text)
    assert not unsafe.search(json.dumps(page.data(), ensure_ascii=False))
    assert len(page.text) < 60_000, "very long names are cut"


def test_nothing_can_be_loaded_and_only_our_script_runs(recorded_page: str) -> None:
    page = Page(recorded_page)
    policy = next(
        attributes["content"] or ""
        for tag, attributes in page.elements
        if tag == "meta" and attributes.get("http-equiv") == "Content-Security-Policy"
    )
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    assert rules["default-src"] == "'none'"
    for name, text in (("style-src", page.raw["style"][0]), ("script-src", page.raw["script"][1])):
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert rules[name] == f"'sha256-{digest}'"
    assert set(rules) == {"default-src", "style-src", "script-src", "img-src", "base-uri", "form-action"}
    loading = {"src", "srcset", "action", "formaction", "ping", "poster", "data"}
    assert not [attributes for _, attributes in page.elements if loading & attributes.keys()]
    assert set(re.findall(r"https?://[^\s\"'<>]+", "".join(page.raw["style"] + page.raw["script"]))) == {
        "http://www.w3.org/2000/svg"
    }
    assert not re.search(r"@import|url\(", page.raw["style"][0])


def test_families_whose_addresses_would_be_equal_have_their_own() -> None:
    names = ["a/b", "a b", "a-b", "", "-", "é", "A" * 300, "A" * 301, "__proto__", "constructor"]
    page = Page(render([document(*map(result, names))]))
    ids = [attributes["id"] for _, attributes in page.elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    families = page.data()["families"]
    assert len(families) == len(names)
    assert {f"family-{name}" for name in families} == {
        one for one in ids if (one or "").startswith("family-")
    }


def test_no_results_are_said_to_be_none() -> None:
    assert "nothing is known of any family" in Page(render([])).text
    assert "nothing is known of any family" in Page(render([document()])).text


def test_equal_documents_give_equal_bytes(recorded: list[Results]) -> None:
    assert render(recorded[:4]) == render(recorded[:4])


def test_figures_of_any_form_can_be_carried() -> None:
    deep: Any = 1
    for _ in range(50):
        deep = {"a": [deep]}
    figures = {
        "inf": math.inf,
        "nan": math.nan,
        "big": 10**40,
        "deep": deep,
        "many": list(range(5_000)),
        "none": None,
    }
    (packed,) = Page(render([document(result(checks=[check(figures=figures)]))])).data()["checks"]
    shown = packed[3]
    assert (shown["inf"], shown["nan"], shown["none"]) == ("∞", "not a number", None)
    assert shown["big"] == str(10**40), "no digit is lost"
    assert len(shown["many"]) == 1_001
    assert "…" in json.dumps(shown["deep"], ensure_ascii=False)
    assert plain(1.23456789e-7) == 1.235e-7


def test_137_families_fit_in_two_megabytes(recorded: list[Results]) -> None:
    many = varied(recorded, 137)
    start = time.process_time()
    page = render(many)
    assert len({own.family for one in many for own in one.results}) == 137
    assert len(page.encode()) < 2_000_000
    assert time.process_time() - start < 20


PAIRS = [
    *((ink, page, 4.5) for ink in ("ink", "muted", "link") for page in ("page", "panel")),
    *(
        (name, ground, 4.5)
        for name in ("good", "part", "bad", "unknown")
        for ground in (f"{name}-tint", "page")
    ),
    *((f"plot-{name}", "page", 4.5) for name in ("compiled", "naive", "allowed")),
    *((name, "panel", 4.5) for name in ("good", "bad", "unknown")),
    *(
        (f"kind-{name}", "page", 3)
        for name in ("linear", "rotating", "chunked", "quantized", "arrays", "composite", "none")
    ),
    ("strong-line", "page", 3),
    ("focus", "page", 3),
]


def palette() -> dict[str, tuple[str, str]]:
    """The colours of the page by name: light, dark."""
    text = (resources.templates() / "report.css").read_text(encoding="utf-8")
    return {
        name: (light, dark)
        for name, light, dark in re.findall(r"--([\w-]+): light-dark\((#\w{6}), (#\w{6})\);", text)
    }


def contrast(one: str, other: str) -> float:
    """The contrast of two colours, as WCAG 2 defines it."""

    def luminance(colour: str) -> float:
        parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    darker, lighter = sorted((luminance(one), luminance(other)))
    return (lighter + 0.05) / (darker + 0.05)


def test_contrast_is_computed_rightly() -> None:
    assert contrast("#000000", "#ffffff") == 21
    assert contrast("#777777", "#ffffff") == pytest.approx(4.48, abs=0.005)


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_the_palette_has_contrast(theme: str) -> None:
    colours = {name: pair[theme == "dark"] for name, pair in palette().items()}
    weak = {
        f"{ink} on {ground}": round(contrast(colours[ink], colours[ground]), 2)
        for ink, ground, least in PAIRS
        if contrast(colours[ink], colours[ground]) < least
    }
    assert weak == {}
    unnamed = colours.keys() - {name for ink, ground, _ in PAIRS for name in (ink, ground)}
    assert unnamed == {"line"}, "a colour of the palette is in no pair"


def test_a_record_leaves_out_what_it_does_not_say() -> None:
    known = environment(mlx="0.32", mlx_audit="", mlx_lm="", python="", platform="", compiler=None)
    page = Page(render([Results(environment=known, results=[result()])]))
    footer = page.text[page.text.index("Where this was made") :]
    assert "mlx 0.32" in footer
    assert "python" not in footer.split("A verdict speaks")[0]
