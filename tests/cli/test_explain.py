"""`mlx-audit explain`."""

from __future__ import annotations

import json

from typer.testing import CliRunner

from mlx_audit.checks.base import all_checks
from mlx_audit.cli import application


def explain(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(application(), ["explain", *arguments])
    return result.exit_code, result.stdout, result.stderr


def test_a_page_is_the_docstring_of_the_check() -> None:
    code, text, _ = explain("TRC001")
    assert code == 0
    check = next(check for check in all_checks() if check.code == "TRC001")
    first, *rest = check.page.splitlines()
    assert text.splitlines()[0] == f"TRC001  {first}"
    assert text.splitlines()[1] == "trace tier, needs TOP001, TOP003"
    assert text.splitlines()[2:] == rest


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
