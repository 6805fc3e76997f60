"""`mlx-audit explain`."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from mlx_audit.checks.base import Check, all_checks
from mlx_audit.cli import application
from mlx_audit.cli.explain import _reflowed


def explain(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(application(), ["explain", *arguments])
    return result.exit_code, result.stdout, result.stderr


@pytest.mark.parametrize("check", all_checks(), ids=lambda check: check.code)
def test_a_page_is_the_docstring_of_the_check_in_80_columns(check: Check) -> None:
    code, text, _ = explain(check.code)
    assert code == 0
    lines = text.splitlines()
    assert max(map(len, lines)) <= 80
    head = f"{check.code} {check.page.splitlines()[0]} {check.tier} tier"
    assert " ".join(text.split()).startswith(head)
    words = check.page.split("\n", 1)[1].split()
    assert text.split()[-len(words) :] == words


def test_what_a_check_needs_is_named() -> None:
    assert explain("TRC001")[1].splitlines()[1] == "trace tier, needs TOP001, TOP003"
    assert explain("RST001")[1].splitlines()[1] == "numeric tier, claim prefix_restore"


def test_an_example_keeps_its_lines_and_paragraphs_are_joined() -> None:
    page = ["What it does:", "    One", "    two.", "", "    Three.", "", "Example:", "    a", "    b"]
    assert list(_reflowed(page, 80)) == [
        *("What it does:", "    One two.", "", "    Three.", ""),
        *("Example:", "    a", "    b"),
    ]
    assert (
        list(_reflowed(["Why:", "    eight words of four letters come here now"], 24))[1]
        == "    eight words of four"
    )


def test_lower_case_codes_are_taken() -> None:
    assert explain("trc001") == explain("TRC001")
    assert explain("trc999")[0] == 2


def test_every_code_has_a_page_with_all_sections() -> None:
    for check in all_checks():
        code, text, _ = explain(check.code)
        assert code == 0
        for section in ("What it does:", "Why:", "Example:", "How to fix:", "Sources:"):
            assert section in text.splitlines(), f"{check.code} has no section {section}"


def test_without_a_code_all_are_listed() -> None:
    code, text, _ = explain()
    assert code == 0
    assert [line.split()[0] for line in text.splitlines()] == [check.code for check in all_checks()]


def test_json() -> None:
    code, text, _ = explain("ENV001", "--json")
    assert code == 0
    page = json.loads(text)
    assert (page["code"], page["tier"]) == ("ENV001", "numeric")
    assert "MLX_DISABLE_COMPILE" in page["page"]
    assert len(json.loads(explain("--json")[1])) == len(all_checks())


def test_an_unknown_code_is_a_usage_error_with_the_nearest_one() -> None:
    code, text, errors = explain("TCR001")
    assert code == 2
    assert text == ""
    assert "did you mean 'TRC001'?" in errors
