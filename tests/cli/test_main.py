"""The application as a whole: verbs, exit codes, errors without tracebacks, and what starting it costs."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import typer
from typer.testing import CliRunner

from mlx_audit import cli
from mlx_audit._version import __version__
from mlx_audit.cli import _console
from mlx_audit.errors import MlxAuditError, NotCompileCapable


def one_verb(verb: object) -> typer.Typer:
    """An application whose only verb is the given function."""
    app = typer.Typer()
    app.command()(cli._guarded(verb))  # type: ignore[arg-type]
    return app


def test_every_verb_is_a_documented_function_of_its_modules_name() -> None:
    verbs = cli.verbs()
    assert {"list", "schema", "validate"} <= set(verbs)
    for name, verb in verbs.items():
        assert verb.__name__ == name
        assert verb.__doc__, f"{name} has no help text"


def test_version() -> None:
    result = CliRunner().invoke(cli.application(), ["--version"])
    assert (result.exit_code, result.stdout) == (0, f"mlx-audit {__version__}\n")


def test_unknown_verbs_and_options_are_usage_errors() -> None:
    for arguments in (["no-such-verb"], ["list", "--no-such-option"]):
        result = CliRunner().invoke(cli.application(), arguments)
        assert result.exit_code == 2
        assert isinstance(result.exception, SystemExit)


@pytest.mark.parametrize(
    ("raised", "code", "text"),
    [
        (MlxAuditError("it broke", where="here", fix="mend it"), 2, "error: here: it broke; fix: mend it\n"),
        (NotCompileCapable("no proof"), 1, "error: no proof\n"),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_expected_errors_become_exit_codes(raised: BaseException, code: int, text: str) -> None:
    def verb() -> int:
        raise raised

    result = CliRunner().invoke(one_verb(verb), [])
    assert (result.exit_code, result.stderr, result.stdout) == (code, text, "")


@pytest.mark.parametrize(("value", "code"), [(None, 0), (0, 0), (3, 3)])
def test_a_verbs_return_value_is_the_exit_code(value: int | None, code: int) -> None:
    def verb() -> int | None:
        return value

    assert CliRunner().invoke(one_verb(verb), []).exit_code == code


def test_unexpected_errors_are_not_hidden() -> None:
    def verb() -> int:
        raise ZeroDivisionError

    assert isinstance(CliRunner().invoke(one_verb(verb), []).exception, ZeroDivisionError)


def test_help_imports_neither_mlx_nor_pydantic() -> None:
    code = (
        "import sys; sys.argv = ['mlx-audit', '--help']\n"
        "from mlx_audit.cli import main\n"
        "try: main()\n"
        "except SystemExit as stop: assert not stop.code, stop.code\n"
        "heavy = {'mlx', 'mlx.core', 'mlx_lm', 'pydantic', 'numpy', 'hypothesis'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr
    assert "validate" in run.stdout


def test_a_closed_pipe_is_quiet() -> None:
    command = [sys.executable, "-m", "mlx_audit", "schema"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as run:
        assert run.stdout is not None
        assert run.stderr is not None
        run.stdout.close()
        assert run.stderr.read() == b""
        assert run.wait(60) == 141


class Terminal:
    """A stream that claims to be a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("name", ["NO_COLOR", "CI"])
def test_colour_is_for_terminals_without_objections(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for other in ("NO_COLOR", "CI"):
        monkeypatch.delenv(other, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert not _console.is_plain(Terminal())  # type: ignore[arg-type]
    monkeypatch.setenv(name, "1")
    assert _console.is_plain(Terminal())  # type: ignore[arg-type]


def test_away_from_a_terminal_there_is_no_colour_and_no_wrapping(capsys: pytest.CaptureFixture[str]) -> None:
    _console.stdout().print("[bold red]" + "word " * 200 + "[/]")
    assert capsys.readouterr().out == "word " * 200 + "\n"
    assert os.environ.get("FORCE_COLOR") is None
