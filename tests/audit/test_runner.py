"""Model code that aborts, hangs, prints or exits is a failed check, and the next target runs."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from command import COMMAND, results_of
from mlx_audit.audit.assembly import Assembly
from mlx_audit.audit.events import CheckFinished, Event, Failed
from mlx_audit.audit.request import Options, Request
from mlx_audit.audit.runner import Outcome, run_audits
from mlx_audit.models.target import resolve_target
from model_files import ABORT, BEYOND, EXIT, FORWARD, PRINT, hang, write_config, write_model

CHEAP = Options(tiers=["static", "trace"])


def request(model: Path, config: Path, options: Options = CHEAP) -> Request:
    return Request.of(resolve_target(str(model), config), options, config)


def failed_code(outcome: Outcome) -> tuple[str, str]:
    (result,) = outcome.results
    (check,) = [check for check in result.checks if check.status == "fail"]
    return check.code, check.reason


def test_an_abort_fails_its_check_and_the_next_target_runs(tmp_path: Path) -> None:
    config = write_config(tmp_path)
    aborts = write_model(tmp_path, "aborts", (FORWARD, ABORT))
    healthy = write_model(tmp_path, "healthy")
    bad, good = run_audits([request(aborts, config), request(healthy, config)], jobs=1)
    code, reason = failed_code(bad)
    assert reason == f"the process died with SIGABRT (signal 6) during {code}"
    check = next(check for check in bad.results[0].checks if check.code == code)
    line = aborts.read_text(encoding="utf-8").splitlines().index("            os.abort()") + 1
    assert check.where == f"aborts.py:{line}"
    assert [c.status for c in bad.results[0].checks if c.code > code and c.tier == "trace"].count("pass") == 0
    assert bad.results[0].verdict == "not-capable"
    assert {check.status for check in good.results[0].checks} <= {"pass", "not-applicable"}


def test_a_system_exit_of_the_model_is_no_pass(tmp_path: Path) -> None:
    model = write_model(tmp_path, "exits", (FORWARD, EXIT))
    (outcome,) = run_audits([request(model, write_config(tmp_path))])
    code, reason = failed_code(outcome)
    assert reason.endswith(f"during {code}")


def test_a_hang_is_stopped_and_named(tmp_path: Path) -> None:
    model = write_model(tmp_path, "hangs", (FORWARD, hang(tmp_path / "pid")))
    (outcome,) = run_audits([request(model, write_config(tmp_path))], timeout=6)
    code, reason = failed_code(outcome)
    assert reason == f"the process was stopped after 6 s (time-out) during {code}"
    check = next(check for check in outcome.results[0].checks if check.code == code)
    assert check.where is not None
    assert check.where.startswith("hangs.py:")
    assert_gone(int((tmp_path / "pid").read_text(encoding="utf-8")))


def test_what_the_model_prints_stays_out_of_the_results(tmp_path: Path) -> None:
    model = write_model(tmp_path, "prints", (FORWARD, PRINT))
    code, results = results_of(model, "--config", write_config(tmp_path), "--tier", "trace")
    assert code == 0
    assert len(results) == 1


@pytest.mark.slow
def test_a_write_beyond_the_buffer_does_not_take_the_audit_down(tmp_path: Path) -> None:
    config = write_config(tmp_path)
    short = write_model(tmp_path, "short", more=BEYOND)
    bad, good = run_audits(
        [request(short, config, Options()), request(write_model(tmp_path, "ok"), config)], jobs=1
    )
    assert bad.results[0].verdict == "not-capable"
    assert good.results[0].verdict == "undecided"
    assert {check.status for check in good.results[0].checks} <= {"pass", "not-applicable"}


def test_a_model_that_cannot_be_built_is_refused(tmp_path: Path) -> None:
    config = write_config(tmp_path)
    config.write_text('{"model_type": "llama"}', encoding="utf-8")
    (outcome,) = run_audits([request(write_model(tmp_path, "mine"), config)])
    assert outcome.results == []
    assert isinstance(outcome.failed, Failed)
    assert outcome.failed.exit_code == 2
    assert "does not fit" in outcome.failed.message


def test_the_listener_hears_every_check(tmp_path: Path) -> None:
    heard: list[str] = []

    def listen(assembly: Assembly, event: Event) -> None:
        if isinstance(event, CheckFinished):
            heard.append(event.check.code)

    (outcome,) = run_audits([request(write_model(tmp_path, "mine"), write_config(tmp_path))], listener=listen)
    assert heard == [check.code for check in outcome.results[0].checks]


@pytest.fixture
def heeding_interrupts() -> Iterator[None]:
    """What a shell starts in the background ignores Ctrl-C, and so do all its children."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("heeding_interrupts")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_no_child_outlives_its_parent(tmp_path: Path, number: signal.Signals) -> None:
    model = write_model(tmp_path, "hangs", (FORWARD, hang(tmp_path / "pid")))
    out = tmp_path / "out.json"
    arguments = ["run", str(model), "--config", str(write_config(tmp_path)), "--json", str(out)]
    parent = subprocess.Popen([*COMMAND, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    pid = wait_for_pid(tmp_path / "pid")
    parent.send_signal(number)
    _, errors = parent.communicate(timeout=30)
    assert parent.returncode == (130 if number == signal.SIGINT else -9)
    assert b"Traceback" not in errors
    assert_gone(pid)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "hangs.py", "pid"]


def wait_for_pid(file: Path) -> int:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if file.is_file() and (text := file.read_text(encoding="utf-8")):
            return int(text)
        time.sleep(0.05)
    raise AssertionError("the model was never run")


def assert_gone(pid: int) -> None:
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return
        time.sleep(0.05)
    raise AssertionError(f"process {pid} is still there")
