"""STA, MSK, CAP, LIF and NEG on every kind of cache: healthy stacks pass, and each fault of a kind is seen."""

from __future__ import annotations

import pytest

from audited import green, only, red
from kind_models import KINDS, kind_subject
from mlx_audit.faults import FAULTS

CODES = (
    *("STA001", "STA002", "STA003", "STA004", "STA005"),
    *("MSK001", "MSK002", "MSK003", "CAP001", "CAP002", "CAP003"),
    *("LIF001", "LIF002", "LIF003", "NEG001"),
)
WITHOUT_SLOTS = ("MSK001", "MSK002")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("code", CODES)
def test_healthy(code: str, kind: str) -> None:
    if kind == "arrays" and code in WITHOUT_SLOTS:
        assert only(code, kind_subject(kind)).reason == "no cache has slots for tokens: nothing is masked"
    else:
        green(code, kind_subject(kind))


def test_what_was_looked_at() -> None:
    kinds = {kind: green("MSK001", kind_subject(kind)).figures["caches"] for kind in ("rotating", "keeping")}
    assert kinds == {"rotating": ["rotating of 8", "linear"], "keeping": ["rotating of 8, 2 kept"]}
    trims = {kind: green("STA003", kind_subject(kind)).figures["trimmed"] for kind in ("rotating", "arrays")}
    # Three trims of a text of 17 tokens; then a ring of 8 with 8 tokens (two), 9 tokens, and 20 tokens.
    assert trims == {"rotating": [0, 0, 0, 1, 4, 0, 0], "arrays": [0, 0, 0]}


RED = {
    ("rotating", "STA001", "ring_turns_one_early"): "differs from eager's at the prompt of the first session",
    ("rotating", "STA001", "ring_write_one_late"): "wrote slots",
    ("rotating", "STA001", "ring_handed_over_in_slot_order"): "caches[0] differs from eager's",
    ("rotating", "STA003", "ring_takes_back_after_turning"): "trim(1) at position 17 returned 1",
    ("rotating", "STA003", "session_trims_what_can"): "trim(1) was refused and changed the state",
    ("rotating", "STA005", "ring_handed_over_in_slot_order"): "eager step 1 after compiled decoding",
    ("rotating", "STA005", "ring_handed_over_emptied"): "eager step 1 after compiled decoding",
    ("rotating", "MSK001", "ring_turns_one_early"): "rotating of 8: at position",
    ("rotating", "MSK001", "ring_write_one_late"): "rotating of 8: at position",
    ("rotating", "MSK001", "ring_window_too_wide"): "rotating of 8: at position",
    ("rotating", "MSK001", "ring_shows_unwritten_slots"): "'unwritten'",
    ("rotating", "MSK001", "ring_takes_back_after_turning"): "rotating of 8: at position",
    ("rotating", "MSK002", "ring_shows_unwritten_slots"): "moved the logits of a step",
    ("rotating", "MSK002", "poison_spreads_from_a_ring"): "moved the logits of a chunk of 3",
    ("keeping", "MSK001", "ring_forgets_what_it_keeps"): "rotating of 8, 2 kept: at position",
    ("chunked", "MSK001", "chunk_edge_one_late"): "chunked of 8: at position",
    ("quantized", "STA005", "quantized_without_biases"): "eager step 1 after compiled decoding",
    (
        "quantized",
        "STA001",
        "quantized_without_biases",
    ): "caches[0] differs from eager's at the prompt of the first session",
    (
        "quantized",
        "STA001",
        "quantized_write_one_early",
    ): "step 1 of the first session wrote slots [12] of caches[0], wanted 13 alone",
    ("quantized", "MSK001", "quantized_write_one_early"): "quantized: at position",
    (
        "arrays",
        "STA001",
        "recurrent_state_not_carried",
    ): "state unchanged by a step (step 1 of the first session, caches[0])",
    (
        "arrays",
        "STA001",
        "recurrent_state_half_carried",
    ): "caches[0] differs from eager's at step 1 of the first session, array 1",
    ("arrays", "STA003", "recurrent_state_says_it_trimmed"): "trim(1) at position 17 returned 1",
    ("arrays", "STA005", "recurrent_state_handed_over_empty"): "eager step 1 after compiled decoding",
    (
        "composite",
        "STA001",
        "recurrent_state_not_carried",
    ): "state unchanged by a step (step 1 of the first session, caches[0][0])",
    ("composite", "STA003", "composite_trims_its_last_part"): "trim(1) at position 17 returned 1",
    ("composite", "STA005", "composite_hands_over_one_part"): "eager step 1 after compiled decoding",
    ("composite_of_slots", "STA001", "composite_hands_over_one_part"): "caches[0][0] differs from eager's",
    (
        "composite_of_slots",
        "STA003",
        "composite_trims_its_last_part",
    ): "the parts stand at different positions",
}


@pytest.mark.parametrize(("kind", "code", "fault"), RED)
def test_red(kind: str, code: str, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    FAULTS[fault](monkeypatch)
    assert RED[kind, code, fault] in red(code, kind_subject(kind)).reason
