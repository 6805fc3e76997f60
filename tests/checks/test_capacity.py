"""CAP001-003, each alone; a guard that comes too late is tried in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from audited import green, healthy, new_subject, red
from mlx_audit.faults import FAULTS
from tiny_models import FAMILIES

CODES = ("CAP001", "CAP002", "CAP003")


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("code", CODES)
def test_healthy(code: str, family: str) -> None:
    green(code, healthy(family))


RED = {
    ("CAP001", "guard_too_early"): "the tokens don't fit; found: 17 held and 2 more; allowed: 18 in all",
    ("CAP001", "step_counts_two"): "the tokens don't fit",
    ("CAP001", "capacity_without_the_prompt"): "13 slots remain after 18 tokens, wanted 0",
    ("CAP001", "write_dropped_from_16"): "logits differ at step 4 of 5",
    ("CAP002", "refused_call_counts"): "extend of 3 was refused, but changed the session",
    ("CAP002", "step_counts_two"): "the tokens don't fit",
    ("CAP003", "tokens_not_checked"): "step([64]) at position 6 of 12 was not refused",
    ("CAP003", "booleans_are_tokens"): "step([True]) at position 6 of 12 was not refused",
    ("CAP003", "failed_step_advances"): "step([64]) was refused, but changed the session",
}


@pytest.mark.parametrize(("code", "fault"), RED)
def test_red(code: str, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    FAULTS[fault](monkeypatch)
    assert RED[code, fault] in red(code, new_subject()).reason


TRIAL = """
import sys, pytest
from mlx_audit.faults import FAULTS
from audited import new_subject, red
FAULTS[sys.argv[1]](pytest.MonkeyPatch())
print(red("CAP002", new_subject()).reason, flush=True)
"""


@pytest.mark.parametrize("fault", ["guard_too_late", "capacity_without_the_prompt"])
def test_one_token_too_many_is_red_or_kills_the_process(fault: str) -> None:
    """The write is outside the buffer, so a signal is as good an answer as a failed check."""
    tests = str(Path(__file__).parents[1])
    run = subprocess.run(
        [sys.executable, "-c", TRIAL, fault],
        env={**os.environ, "PYTHONPATH": tests},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert run.returncode < 0 or "was not refused" in run.stdout, (run.returncode, run.stderr[-2000:])
