"""Inputs that nobody means well: no traceback, one line, and an exit code that says what it was."""

from __future__ import annotations

import os
import resource
import subprocess
import threading
from pathlib import Path

import pytest

from command import COMMAND, environment, mlx_audit, results_of
from mlx_audit.errors import MlxAuditError, clean, storable
from mlx_audit.evidence.records import RecordError, find_record, require_writable, write_atomically
from mlx_audit.models.modules import import_file
from model_files import FORWARD, write_config, write_model

LONG = "x" * 5000


def refused(*arguments: str | Path, code: int = 2, env: dict[str, str | None] | None = None) -> str:
    done = (
        mlx_audit("run", *arguments, env=env) if arguments[0] != "-" else mlx_audit(*arguments[1:], env=env)
    )
    assert "Traceback" not in done.stderr, done.stderr[-2000:]
    assert done.returncode == code, (done.returncode, done.stdout, done.stderr)
    return " ".join(done.stderr.split())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["llama", "--timeout", "inf"], "time-out"),
        (["llama", "--timeout", "1e300"], "time-out"),
        (["llama", "--timeout", "nan"], "--timeout"),
        (["llama", "--seed", "18446744073709551616"], "--seed"),
        (["llama", "--seed", "-1"], "--seed"),
        ([""], "the target is empty"),
        (["llama", "--json", ""], "no file name"),
        (["llama", "--json", "."], "no file name"),
        (["llama", "--json", LONG], "too long"),
        (["llama", "--config", LONG], "too long"),
        (["-", "schema", "-o", ""], "no file name"),
        (["-", "inspect", ""], "the target is empty"),
        (["-", "inspect", "llama", "--timeout", "inf"], "time-out"),
        (["-", "schema", "--check", LONG], "too long"),
    ],
)
def test_values_that_cannot_be_used(arguments: list[str], message: str) -> None:
    assert message in refused(*arguments)


def test_a_name_that_is_no_text() -> None:
    done = subprocess.run(
        [*COMMAND, "run", b"\xff.py", "--config", "config.json"], capture_output=True, timeout=60, check=False
    )
    assert (done.returncode, b"Traceback" in done.stderr) == (2, False)
    assert b"no UTF-8" in done.stderr


def test_a_folder_and_a_missing_folder_are_no_results(tmp_path: Path) -> None:
    assert "this is a folder" in refused("llama", "--json", tmp_path)
    assert "no such folder" in refused("llama", "--json", tmp_path / "absent" / "out.json")
    assert "this is a folder" in refused("-", "schema", "-o", tmp_path)


@pytest.mark.parametrize("folder", ["file", LONG, "file/below"])
def test_records_that_cannot_be_kept(tmp_path: Path, folder: str) -> None:
    (tmp_path / "file").write_text("")
    place = tmp_path / folder
    message = refused("llama", "--record", env={"MLX_AUDIT_RECORDS": str(place)})
    assert "record" in message
    with pytest.raises(RecordError):
        require_writable(place)
    if folder == LONG:
        with pytest.raises(RecordError):
            find_record("llama", "cpu", [place])
    assert "Traceback" not in mlx_audit("list", env={"MLX_AUDIT_RECORDS": str(place)}).stderr


def test_a_file_where_a_familys_records_belong_is_seen_before_the_audit(tmp_path: Path) -> None:
    (tmp_path / "llama").write_text("")
    require_writable(tmp_path)
    with pytest.raises(RecordError, match="cannot be written"):
        require_writable(tmp_path, "llama")
    assert "records cannot be written here" in refused(
        "llama", "--record", env={"MLX_AUDIT_RECORDS": str(tmp_path)}
    )


def test_a_temporary_folder_that_is_not_there(tmp_path: Path) -> None:
    absent = str(tmp_path / "absent")
    message = refused("llama", code=4, env={"TMPDIR": absent})
    assert "the temporary folder does not exist" in message
    assert "TMPDIR" in message
    done = mlx_audit("doctor", env={"TMPDIR": absent})
    assert done.returncode == 4
    assert "the temporary folder does not exist" in done.stdout


def test_nothing_selected_is_nothing_collected() -> None:
    done = mlx_audit("run", "llama", "qwen2", "--only", "TRC001", "--tier", "numeric")
    assert done.returncode == 3, done.stdout
    assert "llama: no check is both" in done.stderr
    assert "qwen2: no check is both" in done.stderr


@pytest.mark.parametrize("verb", [["list"], ["explain"], ["run", "llama", "--only", "TOP001"], ["--help"]])
def test_a_closed_and_a_full_stdout(verb: list[str], tmp_path: Path) -> None:
    closed = subprocess.run(
        ["sh", "-c", 'exec "$@" >&-', "sh", *COMMAND, *verb], capture_output=True, timeout=120, check=False
    )
    assert (closed.returncode, b"stdout is closed" in closed.stderr) == (2, True), closed.stderr
    with (tmp_path / "full").open("wb") as full:
        done = subprocess.run(
            [*COMMAND, *verb],
            stdout=full,
            stderr=subprocess.PIPE,
            env=environment({"PYTHONDONTWRITEBYTECODE": "1"}),
            # A limit of no bytes, for files alone, is what a full disk is.
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY)),
            timeout=120,
            check=False,
        )
    assert done.returncode == 2, done.stderr
    assert done.stderr.count(b"\n") == 1
    assert b"Traceback" not in done.stderr


@pytest.mark.parametrize("write", [["schema", "-o"], ["run", "llama", "--only", "TOP003", "--json"]])
def test_a_pipe_is_written_to_and_stays_one(write: list[str], tmp_path: Path) -> None:
    pipe, link = tmp_path / "pipe", tmp_path / "link"
    os.mkfifo(pipe)
    link.symlink_to(pipe)
    for name in (pipe, link):
        read: list[str] = []
        reader = threading.Thread(target=lambda: read.append(pipe.read_text()), daemon=True)  # noqa: B023
        reader.start()
        done = mlx_audit(*write, name)
        reader.join(10)
        assert done.returncode == 0, done.stderr
        assert read
        assert read[0].startswith("{")
    assert pipe.is_fifo()
    assert link.is_symlink()


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    file, link = tmp_path / "folder" / "out.json", tmp_path / "link"
    link.symlink_to(file)
    for text in ("new", "newer"):
        write_atomically(link, text)
        assert link.is_symlink()
        assert file.read_text() == text
    name = "n" * 250
    write_atomically(tmp_path / name, "long")
    assert (tmp_path / name).read_text() == "long"


@pytest.mark.parametrize(
    ("harm", "code", "message"),
    [
        ("import sys; sys.exit(0)", 2, "SystemExit: 0"),
        ("import os; os._exit(0)", 1, "ended with exit status 0 while the model was inspected"),
        ("import os; os.abort()", 1, "died with SIGABRT (signal 6)"),
        ("while True: pass", 1, "was stopped after 4 s (time-out)"),
        (
            "class E(Exception):\n    def __str__(self): raise RuntimeError\nraise E",
            2,
            "E: <a E that has no text>",
        ),
        (
            "import os\nfor fd in range(3, 9):\n    try: os.write(fd, b'{}\\n')\n    except OSError: pass",
            1,
            "event channel",
        ),
    ],
)
def test_inspect_survives_the_target(tmp_path: Path, harm: str, code: int, message: str) -> None:
    model = write_model(tmp_path, "harm", more=f"\n{harm}\n")
    text = refused(
        "-", "inspect", model, "--config", write_config(tmp_path), "--timeout", "4", "--json", code=code
    )
    assert message in text


def test_a_forward_that_raises_is_shown_by_inspect(tmp_path: Path) -> None:
    raises = f"        raise StopIteration('\\x1b[31mred\\nline')\n{FORWARD}"
    model = write_model(tmp_path, "raises", (FORWARD, raises))
    done = mlx_audit("inspect", model, "--config", write_config(tmp_path))
    assert done.returncode in (0, 2)
    assert "Traceback" not in done.stderr
    assert "\x1b" not in done.stdout + done.stderr
    assert "StopIteration" in done.stdout + done.stderr


def test_foreign_text_is_escaped_and_cut_on_the_way_to_people(tmp_path: Path) -> None:
    text = "\\x1b[31mRED\\nall claims hold\\x9b\\u202e" + "y" * 100_000
    raises = f"        if inputs.shape[1] == 1:\n            raise ValueError('{text}')\n{FORWARD}"
    model = write_model(tmp_path, "esc\x1b[31m\nx", (FORWARD, raises))
    out = tmp_path / "out.json"
    done = mlx_audit("run", model, "--config", write_config(tmp_path), "--only", "TRC001", "--json", out)
    assert done.returncode == 1, done.stderr
    shown = done.stdout + done.stderr
    assert not {"\x1b", "\x9b", "\u202e"} & set(shown)
    assert "\\x1b[31mRED\\nall claims hold\\x9b\\u202e" in shown
    assert max(map(len, shown.splitlines())) < 5000
    assert "\x1b" not in out.read_text()


def test_texts_of_errors_are_one_line() -> None:
    error = MlxAuditError("bad", where="a\nb", found="\x1b[2J\ud800\r" + "z" * 9000)
    assert str(error).startswith("a\\nb: bad; found: \\x1b[2J\\ud800\\rzzz")
    assert len(str(error)) < 2200
    assert clean("plain — é ●") == "plain — é ●"
    assert storable("\n\ud800") == "\n\\ud800"


def test_a_death_before_the_plan_is_not_an_empty_selection(tmp_path: Path) -> None:
    model = write_model(tmp_path, "dies", more="\nimport os\nos.abort()\n")
    done = mlx_audit("run", model, "--config", write_config(tmp_path), "--only", "TRC001")
    assert (done.returncode, done.stderr) == (4, "")
    assert "died with SIGABRT (signal 6) while the model was loaded" in done.stdout


@pytest.mark.parametrize(
    ("harm", "reason"),
    [
        ("while True: pass", "was stopped after 8 s (time-out) while the model was loaded"),
        ("import os; os._exit(0)", "ended with exit status 0 while the model was loaded"),
        ("raise SystemExit(0)", "harm.py:277: the model file cannot be imported"),
        ("def (", "harm.py:277: the model file cannot be imported"),
        (f"x = {'(' * 3000}1{')' * 3000}", "too many nested parentheses"),
        (f"x = {'-' * 100_000}1", "cannot be imported"),
        (f"#{'x' * 60}\n" * 900_000 + "raise SystemExit(0)", "cannot be imported"),
    ],
    ids=["loops", "ends", "exits", "syntax", "nested", "signs", "50 MB"],
)
def test_a_model_that_cannot_be_loaded_is_undecided_with_the_reason(
    tmp_path: Path, harm: str, reason: str
) -> None:
    model = write_model(tmp_path, "harm", more=f"\n\n{harm}\n")
    code, results = results_of(model, "--config", write_config(tmp_path), "--timeout", "8")
    assert (code, [result.verdict for result in results]) == (4, ["undecided"])
    checks = {check.code: check for check in results[0].checks}
    assert reason in checks["TRC001"].reason
    assert {check.status for check in checks.values()} <= {"not-run", "pass"}


def test_names_of_files_make_names_of_modules(tmp_path: Path) -> None:
    config = write_config(tmp_path)
    model = write_model(tmp_path, "a b.c")
    assert mlx_audit("run", model, "--config", config, "--only", "TRC001").returncode == 0
    other = write_model(tmp_path, "a_b_c")
    assert import_file(model).__name__ != import_file(other).__name__


def test_an_import_error_names_the_line_of_the_file(tmp_path: Path) -> None:
    model = write_model(tmp_path, "broken", more="\nimport json\n\njson.loads('{')\n")
    line = len(model.read_text(encoding="utf-8").splitlines())
    with pytest.raises(MlxAuditError, match=rf"broken\.py:{line}: "):
        import_file(model)
    with pytest.raises(MlxAuditError, match=rf"broken\.py:{line}: "):
        import_file(model)


def test_a_locale_without_the_symbols() -> None:
    done = mlx_audit("inspect", "llama", env={"PYTHONIOENCODING": "ascii"})
    assert (done.returncode, done.stderr) == (0, "")
    assert "\\u2588" in done.stdout
