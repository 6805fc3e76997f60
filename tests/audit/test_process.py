"""A child from the parent's side."""

from __future__ import annotations

import os
import signal
import sysconfig

import pytest

from mlx_audit.audit.process import Child, death

REPORT = f"""some warning
terminate called
Fatal Python error: Aborted

Thread 0x1 (most recent call first):
  File "/a/wrong.py", line 1 in watch

Current thread 0x2 (most recent call first):
  File "/v/site-packages/mlx/nn/layers/base.py", line 3 in __call__
  File "{sysconfig.get_path("stdlib")}/threading.py", line 3 in wait
  File "/v/site-packages/mlx_lm/models/llama.py", line 4 in __call__
  File "/home/me/mine.py", line 5 in __call__
  File "<frozen runpy>", line 88 in _run_code
"""


@pytest.mark.parametrize(
    ("status", "text"),
    [
        (0, "ended with exit status 0"),
        (3, "ended with exit status 3"),
        (-6, "died with SIGABRT (signal 6)"),
        (-9, "died with SIGKILL (signal 9)"),
        (-1000, "died with a signal (signal 1000)"),
    ],
)
def test_how_a_process_died(status: int, text: str) -> None:
    assert death(status) == text


@pytest.fixture
def child() -> Child:
    made = Child()
    made.kill()
    return made


def test_the_report_of_a_crash_names_the_model_s_line(child: Child) -> None:
    child._tail = REPORT.encode()
    assert child.where == "mlx_lm/models/llama.py:4"
    child._tail = REPORT.replace("mlx_lm/models/llama", "hypothesis/core").encode()
    assert child.where == "mine.py:5"
    assert child.last_line == "terminate called"
    child._tail = b'Traceback\n  File "/home/me/mine.py", line 5\nValueError: no\n\n'
    assert child.where is None
    assert child.last_line == "ValueError: no"


def test_a_killed_child_leaves_no_process_and_no_pipe(child: Child) -> None:
    child.kill()
    assert child.events == -1
    with pytest.raises(ProcessLookupError):
        os.kill(child._process.pid, signal.SIGTERM)
