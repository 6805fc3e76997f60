"""MSK001-003, each alone: who sees whom."""

from __future__ import annotations

from pathlib import Path

import pytest

from audited import green, healthy, mutated, new_subject, red
from mlx_audit.faults import FAULTS
from mutations import MUTATIONS
from tiny_models import FAMILIES

CODES = ("MSK001", "MSK002", "MSK003")


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("code", CODES)
def test_healthy(code: str, family: str) -> None:
    figures = green(code, healthy(family)).figures
    if code == "MSK001":
        assert figures["attended"] > 0
        assert figures["hidden"] > 0


RED = {
    (
        "MSK001",
        "mask_hides_the_token_itself",
    ): "position 1 the mask of query 0 (window None) shows tokens [0], wanted [0, 1]",
    ("MSK001", "mask_shows_one_ahead"): "shows tokens [0, 1, 2, 3], wanted [0, 1, 2]",
    ("MSK001", "mask_of_a_chunk_shows_one_ahead"): "shows tokens [0, 1, 2, 3], wanted [0, 1, 2]",
    ("MSK001", "mask_forgets_the_first_token"): "shows tokens [1], wanted [0, 1]",
    ("MSK001", "mask_shows_all"): "shows tokens [0, 1, 2, 3, 4], wanted [0, 1, 2]",
    (
        "MSK001",
        "mask_row_all_false",
    ): "the mask of query 2 (window None) shows tokens [], wanted [0, 1, 2, 3, 4]",
    ("MSK001", "mask_window_too_wide"): "(window 1) shows tokens [0, 1], wanted [1]",
    ("MSK001", "mask_by_content"): "shows tokens [0, 'forgotten', 1], wanted [0, 1]",
    ("MSK001", "write_one_early"): "shows tokens ['unwritten', 1], wanted [0, 1]",
    ("MSK002", "mask_shows_one_ahead"): "moved the logits of a step",
    ("MSK002", "mask_of_a_chunk_shows_one_ahead"): "moved the logits of a chunk of 3",
    ("MSK002", "mask_shows_all"): "moved the logits of a step",
    ("MSK002", "mask_by_content"): "moved the logits of a step",
    ("MSK002", "values_never_written"): "moved the logits of a step",
    ("MSK002", "write_by_select"): "",
    ("MSK002", "unwritten_slots_hold_nan"): "caches[0] holds NaN or infinity: masked slots must be finite",
    (
        "MSK002",
        "unwritten_slots_hold_infinity",
    ): "caches[0] holds NaN or infinity: masked slots must be finite",
    ("MSK003", "mask_shows_all"): "capacity 64 against 29",
}


@pytest.mark.parametrize(("code", "fault"), RED)
def test_red(code: str, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    FAULTS[fault](monkeypatch)
    assert RED[code, fault] in red(code, new_subject()).reason


def test_a_position_taken_from_the_key_length_depends_on_the_capacity(tmp_path: Path) -> None:
    subject = new_subject(module=mutated(tmp_path, *MUTATIONS["position_from_key_length"]))
    assert (
        "logits differ at step 1 after a prompt of 1, capacity 64 against 29" in red("MSK003", subject).reason
    )


@pytest.mark.parametrize("mutation", ["mask_made_true", "mask_left_out", "mask_left_out_in_one_layer"])
def test_a_mask_that_the_model_spoils_shows_in_the_slots(mutation: str, tmp_path: Path) -> None:
    subject = new_subject(module=mutated(tmp_path, *MUTATIONS[mutation]))
    assert "is seen: changing it moved the logits" in red("MSK001", subject).reason
    assert "moved the logits of a step" in red("MSK002", subject).reason


def test_an_example_that_fails_only_once_is_a_failure_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hypothesis calls it flaky; sessions that share everything are one cause."""
    FAULTS["copies_share_everything"](monkeypatch)
    for code in ("MSK001", "MSK002"):
        assert "internal error" not in red(code, new_subject()).reason
