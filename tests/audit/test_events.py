"""Events survive the pipe."""

from __future__ import annotations

import pytest

from mlx_audit.audit.events import (
    CheckFinished,
    CheckStarted,
    Done,
    Event,
    Failed,
    Planned,
    PlannedCheck,
    PlannedSubject,
    Ready,
    SubjectFinished,
    SubjectStarted,
    read_event,
    write_event,
)
from mlx_audit.audit.worker import plain
from mlx_audit.evidence.results import CheckResult, Environment

WHERE = Environment(
    mlx_audit="0", mlx="0", mlx_lm="0", python="3", platform="p", backend="cpu", compiler=None
)
SUBJECT = PlannedSubject(
    variant="v",
    configuration="c",
    checks=[PlannedCheck(code="AAA001", name="holds", tier="trace")],
    borrows=[1],
)
RESULT = CheckResult(
    code="AAA001", name="holds", tier="trace", status="fail", reason="é ✕\n", figures={"a": [1]}
)


@pytest.mark.parametrize(
    "event",
    [
        Ready(),
        Planned(environment=WHERE, subjects=[SUBJECT], skipped=["x: why"]),
        SubjectStarted(subject=0),
        CheckStarted(subject=0, code="AAA001"),
        CheckFinished(subject=0, check=RESULT),
        SubjectFinished(subject=0, seconds=0.5),
        Failed(message="no", exit_code=2),
        Done(),
    ],
    ids=lambda event: event.kind,
)
def test_an_event_is_one_line_and_comes_back(event: Event) -> None:
    line = write_event(event)
    assert line.count(b"\n") == 1
    assert read_event(line) == event


@pytest.mark.parametrize("line", [b"", b"hello", b"{}", b'{"kind": "other"}', b'{"kind": "done", "more": 1}'])
def test_other_lines_are_no_events(line: bytes) -> None:
    with pytest.raises(ValueError):
        read_event(line)


def test_figures_become_plain() -> None:
    figures = {
        "set": {2, 1},
        "tuple": (1, None),
        "inf": float("inf"),
        "nan": float("nan"),
        "other": WHERE.__class__,
    }
    wanted = {"set": [1, 2], "tuple": [1, None], "inf": "inf", "nan": "nan", "other": str(Environment)}
    assert plain(figures) == wanted
