"""SRC: hazards that reading finds decide; conditional ones only where the model has what they need."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from audited import green, line_of, mutated, new_subject, only, red
from mlx_audit.checks.base import all_checks, execute_reading
from mlx_audit.checks.source import SourceCheck
from mlx_audit.checks.subject import Source
from model_files import write_model
from tiny_models import config_of

FORWARD = "out = self.model(inputs, cache, input_embeddings)"
CHECKS = [check for check in all_checks() if isinstance(check, SourceCheck)]

PLANTED = {
    "SRC001": (FORWARD, f"inputs = inputs[:, : 1 + int(cache[0].offset)]\n        {FORWARD}"),
    "SRC002": (
        "return self.o_proj(output)",
        "queries = self.rope(queries, offset=keys.shape[2] - L)\n        return self.o_proj(output)",
    ),
    "SRC004": (FORWARD, f"self.last = inputs\n        {FORWARD}"),
    "SRC005": (FORWARD, f"first = inputs[0, 0].item()\n        {FORWARD}"),
}


def test_there_is_a_check_for_each_class_of_hazard() -> None:
    assert [check.code for check in CHECKS] == [f"SRC00{number}" for number in range(1, 7)]


@pytest.mark.parametrize("code", PLANTED)
def test_a_planted_hazard_fails_at_its_line_and_in_no_other_class(tmp_path: Path, code: str) -> None:
    old, new = PLANTED[code]
    subject = new_subject(module=mutated(tmp_path, (old, new)))
    line = line_of(subject.module, new.splitlines()[0].strip())
    result = red(code, subject)
    assert f":{line}:" in (result.where or ""), result.where
    others = [check.code for check in CHECKS if check.code != code]
    assert [only(other, subject).status for other in others] == ["pass"] * len(others)


def test_installed_families_pass() -> None:
    for family in ("llama", "qwen2"):
        for check in CHECKS:
            green(check.code, new_subject(family))


def test_a_conditional_hazard_counts_where_the_model_has_what_it_needs() -> None:
    plain = green("SRC001", new_subject())
    (condition,) = plain.figures["conditional"]
    assert "mlx_lm/models/rope_utils.py:" in condition["what"]
    assert condition["needs"] == ["mlx_lm.models.rope_utils.DynamicNTKScalingRoPE"]
    assert condition["when"] == "rope_type == 'dynamic'"
    dynamic = {
        **config_of("llama"),
        "rope_scaling": {"type": "dynamic", "rope_type": "dynamic", "factor": 2.0},
    }
    assert "mlx_lm/models/rope_utils.py" in (red("SRC001", new_subject(config=dynamic)).where or "")


def test_a_model_that_cannot_be_run_is_read(tmp_path: Path) -> None:
    faulty = write_model(tmp_path, "faulty", PLANTED["SRC001"], more="\nraise SystemExit(0)\n")
    results = {
        check.code: execute_reading(check, Source(faulty), "it ends its process") for check in all_checks()
    }
    assert results["SRC001"].status == "fail"
    assert {results[code].status for code in ("SRC002", "SRC003", "SRC004", "SRC005", "SRC006")} == {"pass"}
    assert results["PAR001"].status == "not-run"
    assert results["PAR001"].reason == "it ends its process"


def test_what_cannot_be_read_is_undecided(tmp_path: Path) -> None:
    broken = write_model(tmp_path, "broken", more="\ndef (\n")
    for check in CHECKS:
        result = execute_reading(check, Source(broken), "no Python")
        assert result.status == "not-run"
        assert str(broken.read_text().count("\n")) in result.reason, "the line is named"
    json.dumps(result.model_dump())
