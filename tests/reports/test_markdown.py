"""The job summary, read as GitHub reads Markdown: tables, and HTML where it is written."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from markdown_it import MarkdownIt
from markdown_it.token import Token

from mlx_audit.errors import clean
from mlx_audit.evidence.results import ClaimResult, KillSummary, Result, Results
from mlx_audit.reports.markdown import LIMIT, render
from report_documents import HOSTILE, check, document, failed, hostile_document, recorded, result

COLUMNS = 9
"""Of the table of claims."""

OURS = re.compile(r"<details><summary>[^<>]*</summary>|</details>|</?code>")
"""All HTML that a summary has."""

LINKED = re.compile(r"@\w|#\d|://|www\.|GH-\d", re.IGNORECASE)
"""What GitHub makes a mention, a reference or a link of, outside of code."""


@functools.cache
def reader() -> MarkdownIt:
    return MarkdownIt("commonmark").enable(["table", "strikethrough"])


def tokens(text: str) -> list[Token]:
    return [inner for token in reader().parse(text) for inner in (token, *(token.children or ()))]


def table(text: str) -> list[list[str]]:
    """Return the cells of the table of claims, as a reader shows them."""
    section = text.partition("\n## Claims\n")[2].partition("\n## Details\n")[0]
    cells = [token for token in reader().parse(section) if token.type == "inline"]
    shown = [
        "".join(inner.content for inner in (cell.children or ()) if inner.type != "html_inline")
        for cell in cells
    ]
    rows = [shown[start : start + COLUMNS] for start in range(0, len(shown), COLUMNS)]
    assert rows[:1] == [
        ["", "family", "variant", "backend", "claim", "claimed", "found", "configurations", "decided by"]
    ]
    return rows[1:]


def title(*results: Result) -> str:
    return render([document(*results)]).splitlines()[0]


REASON = "partial: only some tiers or checks were selected"
PARTIAL = result(
    check(),
    verdict="undecided",
    claims={"compiled_decode": ClaimResult(claimed="capable", verdict="undecided", reason=REASON)},
)


@pytest.mark.parametrize(
    ("results", "sentence"),
    [
        ([result(check()), result(check(), variant="b")], "all 2 claims hold"),
        ([result(check())], "the claim holds"),
        ([result(failed())], "the claim fails"),
        ([result(failed(), claimed="not-capable")], "the claim holds"),
        ([result(check(status="not-run"))], "the claim cannot be decided"),
        ([result()], "the claim cannot be decided"),
        ([result(failed(), claimed="undecided")], "1 claims nothing"),
        ([PARTIAL], "the claim was looked at in part, which proves nothing"),
        (
            [result(check()), result(failed(), variant="b"), result(check(status="not-run"), variant="c")],
            "1 of 3 claims fails, 1 cannot be decided, 1 holds",
        ),
        ([result(check()), result(check(), variant="b"), PARTIAL], "1 of 2 claims was looked at in part"),
        ([result(check()), result(failed(), claimed="undecided")], "the claim holds, 1 more claims nothing"),
        ([], "nothing was collected"),
    ],
)
def test_the_verdict_is_the_first_line(results: list[Result], sentence: str) -> None:
    assert title(*results).startswith(f"# mlx-audit: {sentence}")


def test_the_weakest_configuration_decides() -> None:
    text = render([document(result(check()), result(failed(), configuration="other"))])
    assert title(result(check()), result(failed(), configuration="other")) == "# mlx-audit: the claim fails"
    assert [row[0] for row in table(text)] == ["fails"]


def test_failures_come_before_the_table_and_details() -> None:
    text = render(
        [document(result(check(), family="good"), result(failed(reproduce="mlx-audit run bad --seed 7")))]
    )
    places = [text.index(f"\n## {name}\n") for name in ("Failed claims", "Claims", "Details")]
    assert places == sorted(places)
    failures = text[places[0] : places[1]]
    for piece in (
        "`SRC001`",
        "what must hold",
        "`int(offset)` reads the position",
        "at `mlx_lm/models/bad.py:12:5`",
    ):
        assert piece in failures
    assert "mlx-audit run bad --seed 7" in failures
    assert "good" not in failures
    assert [row[:2] for row in table(text)] == [["fails", "bad"], ["holds", "good"]]


def test_one_fault_is_told_once() -> None:
    rests = check("PAR001", "not-run", reason="needs SRC001, which failed")
    results = [result(failed(), rests, configuration=f"c{number}") for number in range(8)]
    published = failed(figures={"on": "c0"})
    text = render([document(*results, result(published, configuration="org--Model"))])
    failures = text.partition("\n## Claims\n")[0]
    assert failures.count("`SRC001`") == 1
    assert "PAR001" not in failures
    assert "on `c0`, `c1`, `c2`, `c3`, `c4` and 3 more" in failures


def test_what_leaves_a_claim_undecided_is_told_without_what_rests_on_it() -> None:
    cause = check("TRC001", "not-run", reason="the export was refused")
    rests = check("PAR001", "not-run", reason="needs TRC001, which was not run")
    undecided = render([document(result(cause, rests))]).partition("\n## Claims\n")[0]
    assert "`TRC001`" in undecided
    assert "the export was refused" in undecided
    assert "PAR001" not in undecided


def test_what_confirms_a_claim_is_no_failure() -> None:
    text = render([document(result(failed(), claimed="not-capable"))])
    assert "## Failed" not in text
    assert table(text)[0] == [
        "holds", "bad", "full", "cpu", "compiled decode", "not-capable", "✕ not-capable", "tiny", "SRC001",
    ]  # fmt: skip


def test_details_say_why_and_where_a_confirmed_failure_is() -> None:
    """No section above them tells it; figures within figures are told in the report's own words."""
    why = failed("SRC001", reason="it reads the position", where="mlx_lm/models/x.py:7:3")
    seen = check("TOP001", figures={"layers": [["linear", 4]], "runs": [{"tokens": 16, "share": 0.5}]})
    details = render([document(result(why, seen, claimed="not-capable"))]).partition("## Details")[2]
    (row,) = [line for line in details.splitlines() if line.startswith("| `SRC001`")]
    assert "it reads the position at `mlx_lm/models/x.py:7:3`" in row
    assert "`layers` `[[linear, 4]]`, `runs` `[{tokens 16, share 0.5}]`" in details


def test_a_stale_or_missing_record_names_the_command_that_mends_it() -> None:
    for reason in (
        "stale: the source of mlx_lm.models.bad changed since",
        "no record of this variant on cpu",
    ):
        claim = ClaimResult(claimed="capable", verdict="undecided", reason=reason)
        text = render([document(result(verdict="undecided", claims={"compiled_decode": claim}))])
        undecided = text.partition("\n## Claims\n")[0]
        assert "## Cannot be decided" in undecided
        assert "mlx-audit run bad --record" in undecided


def test_a_command_of_ours_quotes_what_a_shell_would_run() -> None:
    text = render([document(result(failed(), target="x; rm -rf ~"))])
    assert "mlx-audit run 'x; rm -rf ~' --only SRC001" in text


def test_several_environments_are_told_apart() -> None:
    text = render([document(result(check())), document(result(failed()), backend="cuda", mlx="0.33")])
    assert [row[3] for row in table(text)] == ["cuda", "cpu"]
    assert "- `cpu`: 1 result; " in text
    assert "mlx `0.33`" in text


def test_planted_faults_are_counted() -> None:
    faults = KillSummary(profile="ci", killed={"PAR001": ["a", "b"], "MSK001": ["c"]}, survived=["late"])
    text = render([document(result(check(), faults=faults))])
    assert "Planted faults: 3 seen by the check named for them, 1 not; survived: `late`." in text


def test_the_committed_records() -> None:
    text = render(recorded())
    variants = {(r.family, r.variant, d.environment.backend) for d in recorded() for r in d.results}
    rows = table(text)
    assert {(row[1], row[2], row[3]) for row in rows} == variants
    assert len(text.encode()) < LIMIT / 2
    assert ["llama4", "chunked", "cpu", "compiled decode", "not-capable"] in [row[1:6] for row in rows]


# Foreign text.


def cell(name: str) -> str:
    """Return what a cell of the table shows of a name."""
    return clean(name, 100).strip() or "–"


def foreign(text: str, documents: Sequence[Results]) -> Iterator[str]:
    """Yield what of a document would be more than text."""
    within_code = False
    for token in tokens(text):
        if token.type in ("html_block", "html_inline") and OURS.sub("", token.content).strip():
            yield f"HTML: {token.content}"
        if token.type in ("link_open", "image", "strong_open", "em_open", "s_open"):
            yield token.type
        if token.type == "html_inline":
            within_code = token.content == "<code>"
        if token.type == "text" and not within_code and LINKED.search(token.content):
            yield f"linked: {token.content}"
    names = {(cell(r.family), cell(r.variant)) for part in documents for r in part.results}
    rows = table(text)
    if {(row[1], row[2]) for row in rows} != names or len(rows) != len(names):
        yield f"rows: {rows}"


def harmless(documents: Sequence[Results]) -> None:
    text = render(documents)
    # Our own emphasis is taken away first; what is left is theirs.
    for ours in ("**fails**", "**undecided**", "**failed**"):
        text = text.replace(ours, ours.strip("*"))
    text = re.sub(
        r"^- \*\*(<code>.*?</code>|(`+)[^\n]+?(?<!`)\2(?!`)|–)\*\* ", r"- \1 ", text, flags=re.MULTILINE
    )
    assert list(foreign(text, documents)) == []
    assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\u2028\u202e\u2066\ud800-\udfff]", text)


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_text(text: str) -> None:
    harmless([hostile_document([text])])


@settings(max_examples=60)
@given(st.text(st.sampled_from("`|\\*_[]()<>&;#@!~$-+=.:/'\"\n ab1"), max_size=24))
def test_any_markup(text: str) -> None:
    harmless([hostile_document([text])])


@settings(max_examples=30)
@given(st.text(max_size=40))
def test_any_text(text: str) -> None:
    harmless([hostile_document([text])])


def test_the_tests_of_foreign_text_can_fail() -> None:
    head = "\n## Claims\n\n| | family | variant | backend | claim | claimed | found | configurations | decided by |\n"
    start = f"{head}|---|---|---|---|---|---|---|---|---|\n| "
    for text in ("<b>x", "[a](https://b.c)", "@someone", "see #1", "*x*"):
        assert list(foreign(f"{start}{text} |\n", [document(result(check()))])), text
    assert any("rows" in what for what in foreign(f"{start}holds | a |\n", [document(result(check()))]))


# Size.


@pytest.mark.parametrize("length", [10, 5_000])
def test_it_is_below_the_limit_and_says_what_is_left_out(length: int) -> None:
    many = [
        result(
            failed(reason="`" + "é" * length + f"{number}`"), family=f"f{number}", configuration="c" * length
        )
        for number in range(3_000)
    ]
    text = render([document(*many)])
    assert LIMIT * 0.5 < len(text.encode()) < LIMIT
    assert text.startswith("# mlx-audit: 3,000 of 3,000 claims fail\n")
    for noun, shown in (
        ("claims", len(re.findall(r"^### ", text, re.MULTILINE))),
        ("rows", len(re.findall(r"^\| \*\*fails", text, re.MULTILINE))),
        ("variants", text.count("<details>")),
    ):
        left_out = re.search(rf"^… and ([\d,]+) more {noun}, left out", text, re.MULTILINE)
        assert left_out is not None, noun
        assert shown + int(left_out[1].replace(",", "")) == 3_000
        assert shown > 0
    assert text.count("<details>") == text.count("</details>")
    assert len(list(re.finditer("^```", text, re.MULTILINE))) % 2 == 0


def test_a_failure_among_thousands_is_shown() -> None:
    many = [result(check(), family=f"f{number}") for number in range(4_000)]
    text = render([document(*many, result(failed(), family="last"))])
    assert text.startswith("# mlx-audit: 1 of 4,001 claims fails, 4,000 hold\n")
    assert "### `last`" in text
    assert len(text.encode()) < LIMIT
