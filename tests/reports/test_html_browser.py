"""The HTML page in a real browser: no request, no message, filters, keyboard, drawings, both themes, two widths."""

from __future__ import annotations

import time
from typing import Any

import pytest

from mlx_audit.evidence.results import Results
from mlx_audit.reports.html import render
from pages import Viewer, check, document, hostile_document, result

pytestmark = pytest.mark.xdist_group("browser")

NARROW = {"width": 390, "height": 844}
SHOWN = "tbody tr:not([hidden])"

# The contrast of each visible text with what is painted behind it: texts that have too little, by WCAG 2 AA.
WEAK = """() => {
  const parse = (colour) => (colour.match(/[\\d.]+/g) || []).map(Number);
  const luminance = ([r, g, b]) => {
    const curve = (part) => (part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4);
    const linear = [r, g, b].map((part) => curve(part / 255));
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2];
  };
  const ground = (node) => {
    for (let at = node; at; at = at.parentElement) {
      const colour = parse(getComputedStyle(at).backgroundColor);
      if (colour.length === 3 || colour[3] > 0.99) return colour;
    }
    return [255, 0, 255];
  };
  const weak = [];
  let seen = 0;
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let text = walker.nextNode(); text; text = walker.nextNode()) {
    const node = text.parentElement;
    if (!text.data.trim() || !node.checkVisibility() || node.closest("script,style,title,desc,.sr")) continue;
    const style = getComputedStyle(node);
    const ink = parse(node.namespaceURI.endsWith("svg") ? style.fill : style.color);
    const [high, low] = [luminance(ink), luminance(ground(node))].sort((one, other) => other - one);
    const size = parseFloat(style.fontSize);
    const least = size >= 24 || (size >= 18.66 && style.fontWeight >= 700) ? 3 : 4.5;
    seen += 1;
    if ((high + 0.05) / (low + 0.05) < least) weak.push(`${text.data.trim().slice(0, 40)}: ${ink} on ${ground(node)}`);
  }
  return { seen, weak };
}"""


NAMES = """(all) => all.map((svg) =>
  svg.getAttribute("aria-labelledby").split(" ").map((id) => document.getElementById(id).textContent))"""
"""Title and description of each drawing."""

OUTSIDE = """(width) => [...document.querySelectorAll("main *")]
  .filter((node) => node.checkVisibility() && !node.closest(".scroll, .sr"))
  .filter((node) => node.getBoundingClientRect().right > width + 1)
  .map((node) => node.outerHTML.slice(0, 80))"""
"""What reaches beyond the right edge, other than what scrolls by itself."""


RINGED = """() => [document.activeElement, document.activeElement.nextElementSibling].some((node) => {
  const style = node && getComputedStyle(node);
  return style && style.outlineStyle === "solid" && style.opacity === "1" && parseFloat(style.outlineWidth) >= 2;
})"""
"""Whether it can be seen what has the focus: on itself, or on the face of a hidden checkbox."""


def until(page: Any, expression: str) -> None:
    """Wait until something is so; the page's policy forbids the browser's own way, which makes code of a text."""
    deadline = time.monotonic() + 10
    while not page.evaluate(expression):
        assert time.monotonic() < deadline, expression
        page.wait_for_timeout(20)


def open_family(page: Any, family: str) -> Any:
    """Open a family's section by its link, and return it when it is drawn."""
    page.click(f'.board tr:not([hidden]) a[href="#family-{family}"] >> nth=0')
    page.wait_for_selector(f"#family-{family}[data-state=built]")
    return page.locator(f"#family-{family}")


def count(page: Any) -> str:
    return str(page.text_content("#count"))


def test_filters_count_and_are_kept_in_the_address(viewer: Viewer, some_page: str) -> None:
    page = viewer.open(some_page)
    total = page.locator(SHOWN).count()
    assert total >= 10
    assert count(page) == f"{total} of {total} shown"
    page.check("input[value=not-capable]")
    families = page.locator(f"{SHOWN} .c-family").all_text_contents()
    assert set(families) == {"llama4"}
    assert count(page) == f"{len(families)} of {total} shown"
    page.select_option("[name=backend]", "cpu")
    assert page.locator(SHOWN).count() == 1
    page.check("input[value=limited]")
    page.fill("[name=q]", "QWEN2-vl-2b")
    assert page.locator(f"{SHOWN} .c-family").all_text_contents() == ["qwen2_vl"], "by a configuration's name"
    page.select_option("[name=claim]", "compiled decode")
    address = page.evaluate("location.hash")
    assert address == "#verdict=limited,not-capable&backend=cpu&claim=compiled+decode&q=QWEN2-vl-2b"
    page.reload()
    assert page.locator(f"{SHOWN} .c-family").all_text_contents() == ["qwen2_vl"]
    assert page.input_value("[name=q]") == "QWEN2-vl-2b"
    page.fill("[name=q]", "no such thing")
    assert page.is_visible("#empty")
    assert count(page) == f"0 of {total} shown"
    page.click("#clear-empty")
    assert page.locator(SHOWN).count() == total
    assert page.evaluate("location.hash") in ("", "#")
    assert not page.is_visible("#empty")


def test_an_address_of_another_page_is_taken_as_far_as_it_makes_sense(viewer: Viewer, some_page: str) -> None:
    page = viewer.open(
        some_page, "#backend=tpu&verdict=perfect,limited&family=none,__proto__&theme=pink&x=%E0%A4%A"
    )
    assert set(page.locator(f"{SHOWN} .c-verdict").all_text_contents()) == {"limited"}
    assert page.input_value("[name=backend]") == ""


def test_all_of_it_works_by_keyboard(viewer: Viewer, some_page: str) -> None:
    page = viewer.open(some_page)
    focused = "document.activeElement"
    page.keyboard.press("Tab")
    assert page.evaluate(f"{focused}.className") == "skip"
    assert page.evaluate(f"{focused}.getBoundingClientRect().width") > 50, "it shows when it has the focus"
    stops = []
    for _ in range(40):
        page.keyboard.press("Tab")
        stops.append(
            page.evaluate(f"{focused}.id || {focused}.name || {focused}.className || {focused}.textContent")
        )
        ring = page.evaluate(RINGED)
        assert ring, f"{stops[-1]} shows no focus"
        if stops[-1] == "claim":
            break
    assert [stop for stop in stops if stop in ("theme", "verdict", "q", "backend", "claim")] == [
        "theme", *["verdict"] * 4, "q", "backend", "claim",
    ]  # fmt: skip
    page.focus("input[value=limited]")
    page.keyboard.press("Space")
    assert set(page.locator(f"{SHOWN} .c-family").all_text_contents()) == {"qwen2_vl"}
    page.focus("#family-qwen2_vl > summary")
    page.keyboard.press("Enter")
    page.wait_for_selector("#family-qwen2_vl .block")
    assert "family=qwen2_vl" in page.evaluate("location.hash")
    page.focus("#family-qwen2_vl .configuration summary >> nth=0")
    page.keyboard.press("Enter")
    page.wait_for_selector("#family-qwen2_vl .checks")


def test_the_skip_link_keeps_the_filters(viewer: Viewer, some_page: str) -> None:
    page = viewer.open(some_page, "#verdict=limited")
    shown = page.locator(SHOWN).count()
    page.focus(".skip")
    page.keyboard.press("Enter")
    until(page, "document.activeElement.id === 'board'")
    assert page.locator(SHOWN).count() == shown
    until(page, "location.hash === '#verdict=limited'")


def test_a_section_draws_layers_errors_and_faults(viewer: Viewer, audited_page: str) -> None:
    page = viewer.open(audited_page)
    section = open_family(page, "llama")
    drawings = section.locator("svg[role=img]")
    named = drawings.evaluate_all(NAMES)
    titles = [title for title, _ in named]
    assert titles == [
        "4 caches, in order",
        "Error at each step, tiny",
        "Planted faults, by the check that is named for them",
    ]
    layers, errors, faults = (description for _, description in named)
    assert layers == "4 × linear"
    assert "compiled: 0 at each of" in errors
    assert "naive compile: 0, " in errors
    assert errors.endswith("Allowed: 0.")
    assert faults.startswith("3 seen, 1 not seen, 1 that")
    assert section.locator(".naive .mark").count() == 6
    zero = section.locator(".compiled .mark").first.bounding_box()["y"]
    wrong = section.locator(".naive .mark").nth(1).bounding_box()["y"]
    assert wrong < zero - 100, "zero is at the bottom"
    assert section.locator(".fault-survived").count() == 1
    assert "80,256" not in (text := section.locator(".costs").inner_text())
    assert " kB" in text
    section.locator(".configuration summary").click()
    section.locator(".checks").wait_for()
    rows = section.locator(".checks tr:not(.tier) th[scope=row]").all_text_contents()
    assert rows == ["TOP001", "TRC002", "NEG001", "PAR001"]
    assert "max_difference 0" in section.locator(".checks").inner_text()


def test_results_without_the_figures_say_so(viewer: Viewer) -> None:
    checks = [
        check("TOP001", tier="static", figures={"caches": 4, "kinds": {"linear": 4}}),
        check("PAR001", figures={"float32": {"class": "exact", "minimum_tolerance": 0.0}}),
        check("NEG001", figures={"relative_differences": [0.0, 1.2, "inf"]}),
    ]
    page = viewer.open(render([document(result(checks=checks))]), "#family=llama")
    page.wait_for_selector("#family-llama[data-state=built]")
    text = page.locator("#family-llama .block").inner_text()
    assert "made before the order of layers was kept; TOP001 counts 4 × linear" in text
    assert "Compiled decoding is not drawn" in text
    assert "No summary: no fault was planted" in text
    assert "Not known: TRC002 did not get so far" in text


def test_evidence_that_lapsed_gives_its_own_reason(viewer: Viewer) -> None:
    reason = "stale: recorded with mlx 0.31, installed is 0.32"
    lapsed = result("phi3", "undecided", checks=[check("MSK001", "not-run", reason="x")], reason=reason)
    page = viewer.open(render([document(lapsed)]), "#family=phi3")
    page.wait_for_selector("#family-phi3[data-state=built]")
    assert page.locator(".decided").all_inner_texts() == [f"{reason}\n\ntiny"]


def test_a_failure_names_the_place_and_its_command_is_copied(viewer: Viewer, audited_page: str) -> None:
    page = viewer.open(audited_page, permissions=["clipboard-read", "clipboard-write"])
    assert "1 of 2 claims fails." in page.locator(".state.bad").inner_text()
    section = open_family(page, "olmo")
    decided = section.locator(".decided")
    assert "MSK001" in decided.inner_text()
    assert "step 4, caches[0]" in decided.inner_text()
    assert decided.locator("p code").all_text_contents() == ["MSK001", "token 3"], "backquotes become code"
    decided.locator("button.copy").first.click()
    until(page, "document.querySelector('.decided .copy').textContent === 'Copied'")
    assert page.evaluate("navigator.clipboard.readText()") == "mlx-audit run llama --only MSK001"
    # Without the clipboard's own interface, as in a page that is not trusted with it.
    page.evaluate("Object.defineProperty(navigator, 'clipboard', {value: undefined})")
    page.evaluate("document.addEventListener('copy', () => (window.taken = document.activeElement.value))")
    decided.locator("button.copy").nth(1).click()
    until(page, "window.taken === 'mlx-audit explain MSK001'")
    assert decided.locator("button.copy").nth(1).evaluate("(node) => node === document.activeElement")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_text_has_contrast(viewer: Viewer, scheme: Any, audited_page: str) -> None:
    page = viewer.open(audited_page, "#family=llama,olmo", color_scheme=scheme)
    page.wait_for_selector("#family-olmo[data-state=built]")
    page.wait_for_selector("#family-llama[data-state=built]")
    page.locator("#family-llama .configuration summary").click()
    page.wait_for_selector(".checks")
    background = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert background == {"light": "rgb(255, 255, 255)", "dark": "rgb(13, 17, 23)"}[scheme]
    found = page.evaluate(WEAK)
    assert found["seen"] > 200
    assert found["weak"] == []


def test_the_theme_can_be_switched_and_is_kept(viewer: Viewer, audited_page: str) -> None:
    page = viewer.open(audited_page, color_scheme="light")
    page.click("#theme")
    dark = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert dark == "rgb(13, 17, 23)"
    assert "theme=dark" in page.evaluate("location.hash")
    page.reload()
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == dark
    assert page.text_content("#theme") == "Light theme"


@pytest.mark.parametrize("width", [320, 390, 1440])
def test_no_width_scrolls_sideways(viewer: Viewer, width: int, audited_page: str) -> None:
    page = viewer.open(audited_page, "#family=llama,olmo", viewport={"width": width, "height": 844})
    page.wait_for_selector("#family-llama[data-state=built]")
    page.wait_for_selector("#family-olmo[data-state=built]")
    page.locator("#family-llama .configuration summary").click()
    page.wait_for_selector(".checks")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.evaluate(OUTSIDE, width) == []
    wide = "Object.assign(document.querySelector('.scroll'), {scrollLeft: 1e6})"
    hidden = page.evaluate(f"{wide}.scrollWidth - {wide}.clientWidth - {wide}.scrollLeft")
    assert abs(hidden) <= 1, "what is too wide can be scrolled to"
    assert page.locator(".board [role=row]").count() == 3, "it is a table at any width"
    assert page.get_by_role("rowheader", name="llama").count() >= 1


def test_landmarks_and_names(viewer: Viewer, audited_page: str) -> None:
    page = viewer.open(audited_page, "#family=llama")
    page.wait_for_selector("#family-llama[data-state=built]")
    for role in ("banner", "main", "contentinfo"):
        assert page.get_by_role(role).count() == 1, role
    assert page.get_by_role("heading", level=1).count() == 1
    assert page.get_by_role("table", name="Compatibility board").count() == 1
    assert page.get_by_role("columnheader").count() == 9 + 6, "of the board, and of the cost of a step"
    assert page.get_by_role("searchbox", name="Search").count() == 1
    assert page.get_by_role("checkbox", name="not capable").count() == 1
    verdicts = page.locator(".c-verdict .badge").all_text_contents()
    assert verdicts == ["capable", "not capable"], "a word, not a colour alone"
    assert page.locator(".c-verdict .badge svg").count() == 2
    ids = page.evaluate("[...document.querySelectorAll('[id]')].map((n) => n.id)")
    assert len(ids) == len(set(ids))


def test_hostile_texts_do_nothing(viewer: Viewer) -> None:
    page = viewer.open(render([hostile_document()]), viewport=NARROW)
    for summary in page.locator("details.family > summary").all():
        summary.click()
    until(page, "![...document.querySelectorAll('details.family')].some((n) => n.dataset.state !== 'built')")
    for _ in range(2):  # what is behind a summary may have one itself
        page.evaluate("document.querySelectorAll('details').forEach((n) => (n.open = true))")
        page.wait_for_timeout(100)
    assert page.locator(".checks").count() >= 10
    assert page.locator(".block").count() >= 10
    assert page.locator("img, iframe, object, embed, [onload], [onerror], [autofocus]").count() == 0
    assert page.locator("script").count() == 2
    for width in (390, 1440):
        page.set_viewport_size({"width": width, "height": 900})
        page.wait_for_timeout(100)
        assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert "alert(1)" in page.locator("main").inner_text()


def test_the_policy_of_the_page_stops_what_is_put_into_it(viewer: Viewer, audited_page: str) -> None:
    page = viewer.open(audited_page)
    markup = '<img src=x onerror="window.ran = 1"><style>body { color: red }</style>'
    page.evaluate("(markup) => document.body.insertAdjacentHTML('beforeend', markup)", markup)
    page.evaluate("fetch('https://example.com/').catch(() => (window.refused = true))")
    until(page, "window.refused")
    assert page.evaluate("window.ran") is None
    refused = "\n".join(viewer.noted)
    for what in ("inline style", "Loading the image", "inline event handler", "Connecting to"):
        assert what in refused, "the browser says what it refused"
    viewer.noted.clear()


def test_without_scripts_the_board_can_be_read(
    viewer: Viewer, some_records: list[Results], some_page: str
) -> None:
    page = viewer.open(some_page, java_script_enabled=False)
    rows = page.locator(".board tbody tr")
    assert rows.count() == len(
        {
            (r.family, r.variant, one.environment.backend, claim)
            for one in some_records
            for r in one.results
            for claim in r.claims
        }
    )
    assert rows.last.is_visible()
    assert not page.is_visible("[name=q]"), "nothing is offered that does not work"
    assert page.is_visible("text=The board above is complete")


def test_printed_and_with_less_motion(viewer: Viewer, audited_page: str) -> None:
    page = viewer.open(audited_page, "#family=llama", reduced_motion="reduce", color_scheme="dark")
    page.wait_for_selector("#family-llama[data-state=built]")
    assert page.evaluate("getComputedStyle(document.documentElement).scrollBehavior") == "auto"
    page.emulate_media(media="print")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert not page.is_visible("[name=q]")
    assert not page.is_visible("#family-olmo")
    assert page.is_visible("#family-llama .block")
