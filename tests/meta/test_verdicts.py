"""What all checks together say about whole models: never `capable` where a mistake was planted."""

from __future__ import annotations

from pathlib import Path

import pytest

from audited import all_results, healthy, mutated, new_subject
from mlx_audit.evidence.verdict import decide
from mutations import MUTATIONS
from tiny_models import FAMILIES

HEALTHY = ("renamed", "rotated_after_the_update", "offset_read_after_the_update", "attention_in_float32")


@pytest.mark.nightly  # ordinary runs audit them from the command line
@pytest.mark.parametrize("family", FAMILIES)
def test_a_real_family_is_capable(family: str) -> None:
    assert decide(list(all_results(healthy(family)).values())).name == "capable"


@pytest.mark.parametrize(
    "mutation", [HEALTHY[0], *(pytest.param(name, marks=pytest.mark.nightly) for name in HEALTHY[1:])]
)
def test_a_clean_copy_is_capable(mutation: str, tmp_path: Path) -> None:
    module = mutated(tmp_path, *MUTATIONS[mutation])
    assert decide(list(all_results(new_subject(module=module)).values())).name == "capable"


WRITTEN_OUT = ("attention_written_out", "attention_with_additive_mask")
WRONG = sorted(set(MUTATIONS) - {*HEALTHY, *WRITTEN_OUT})


@pytest.mark.parametrize("mutation", WRONG)
def test_a_mistake_in_the_source_is_never_capable(mutation: str, tmp_path: Path) -> None:
    results = all_results(new_subject(module=mutated(tmp_path, *MUTATIONS[mutation])))
    verdict = decide(list(results.values()))
    assert verdict.name == "not-capable", verdict
    assert "internal error" not in " ".join(result.reason for result in results.values())
