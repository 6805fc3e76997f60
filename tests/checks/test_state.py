"""STA001-005, each alone: state, copies, trim, files, hand-over."""

from __future__ import annotations

import mlx.core as mx
import pytest

from audited import green, healthy, new_subject, only, red
from mlx_audit.decode import CompiledDecodeSession as Session
from mlx_audit.faults import FAULTS
from tiny_models import FAMILIES

CODES = ("STA001", "STA002", "STA003", "STA004", "STA005")


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("code", CODES)
def test_healthy(code: str, family: str) -> None:
    green(code, healthy(family))


RED = {
    ("STA001", "frozen_write"): "step 1 of the first session wrote slots [3] of caches[0], wanted 13 alone",
    (
        "STA001",
        "write_one_late",
    ): "step 1 of the first session wrote slots [14] of caches[0], wanted 13 alone",
    (
        "STA001",
        "write_one_early",
    ): "step 1 of the first session wrote slots [12] of caches[0], wanted 13 alone",
    (
        "STA001",
        "two_slots_written",
    ): "step 1 of the first session wrote slots [13, 14] of caches[0], wanted 13 alone",
    ("STA001", "write_dropped_from_16"): "state unchanged by a step (step 4 of the first session, caches[0])",
    ("STA001", "write_by_select"): "state unchanged by a step (step 4 of the first session, caches[0])",
    (
        "STA001",
        "keys_and_values_swapped",
    ): "caches[0] differs from eager's at step 1 of the first session, slot 13",
    (
        "STA001",
        "values_never_written",
    ): "caches[0] differs from eager's at step 1 of the first session, slot 13",
    (
        "STA001",
        "position_stands_still",
    ): "caches[0] holds (1, 2, 13, 8) at step 1 of the first session, eager holds (1, 2, 14, 8)",
    ("STA001", "rope_one_late"): "caches[0] differs from eager's at step 1 of the first session, slot 13",
    ("STA001", "rope_one_early"): "caches[0] differs from eager's at step 1 of the first session, slot 13",
    (
        "STA001",
        "cache_in_half_precision",
    ): "caches[0] differs from eager's at the prompt of the first session",
    ("STA001", "handed_over_one_short"): "caches[0] holds (1, 2, 12, 8) at the prompt of the first session",
    ("STA001", "caches_in_another_order"): "of caches[0], wanted 13 alone",
    (
        "STA001",
        "position_kept_with_the_model",
    ): "caches[0] holds (1, 2, 8, 8) at step 7 of the first session, eager holds (1, 2, 20, 8)",
    (
        "STA001",
        "prompt_of_one_token_dropped",
    ): "caches[0] differs from eager's at the prompt of a second session, slot 0",
    ("STA002", "copies_share_everything"): "stepping the copy changed the other session's state",
    ("STA002", "copies_share_their_list"): "stepping the copy changed the other session's state",
    (
        "STA002",
        "a_trace_for_every_session",
    ): "before the copy steps the original counts 1 traces and the copy 0, wanted one that they share",
    ("STA003", "trim_lies"): "after trim(1) caches[0] stands at 17, wanted 16",
    (
        "STA003",
        "trim_changes_nothing_but_the_count",
    ): "trim(1) at position 17 returned 1 and left position 17",
    ("STA003", "trim_takes_what_there_is"): "trim(18) at position 17 was not refused",
    ("STA003", "refused_trim_trims_some_caches"): "trim(1) was refused and changed the state",
    ("STA003", "mask_by_content"): "after trim(3)",
    ("STA004", "saved_without_position"): "position of cache 0 does not fit the model; found: 0; allowed: 14",
    ("STA004", "saved_from_the_start"): "the loaded state differs from the saved one",
    ("STA004", "saved_in_half_precision"): "the loaded state differs from the saved one",
    ("STA005", "handed_over_one_short"): "the state stands at another position; found: 15; allowed: 16",
    ("STA005", "handed_over_one_late"): "the state stands at another position; found: 17; allowed: 16",
    ("STA005", "adopted_one_short"): "the state stands at another position",
    ("STA005", "native_cache_emptied"): "logits differ at",
    ("STA005", "buffers_shared_with_native"): "changed the session's own",
}


@pytest.mark.parametrize(("code", "fault"), RED)
def test_red(code: str, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    FAULTS[fault](monkeypatch)
    assert RED[code, fault] in red(code, new_subject()).reason


def test_a_copy_that_traces_again_behind_the_same_count_is_red(monkeypatch: pytest.MonkeyPatch) -> None:
    own = Session.copy

    def copy(self: Session) -> Session:
        other = own(self)
        for compiled in other._rungs.values():
            compiled._compiled = mx.compile(compiled._compiled)  # keyed anew, so that the body runs again
        return other

    monkeypatch.setattr(Session, "copy", copy)
    assert "after both stepped the original counts 2 traces" in red("STA002", new_subject()).reason


def test_a_shift_of_every_position_shows_only_in_the_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rotary embeddings are relative: within a tolerance, logits don't tell."""
    FAULTS["rope_shifted_from_the_start"](monkeypatch)
    subject = new_subject(exactness="reordered")
    blind = ("TRC001", "TRC004", "TRC005", "PAR002", "PAR003", "MSK001", "MSK002", "MSK003", "CAP001")
    assert {code: only(code, subject).status for code in blind} == dict.fromkeys(blind, "pass")
    assert (
        "caches[0] differs from eager's at the prompt of the first session" in red("STA001", subject).reason
    )
    assert "eager step 1 after compiled decoding" in red("STA005", subject).reason


def test_a_shift_that_a_first_session_leaves_shows_in_the_state_of_the_second(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    FAULTS["rope_shifted_in_a_second_session"](monkeypatch)
    reason = red("STA001", new_subject(exactness="reordered")).reason
    assert "caches[0] differs from eager's at the prompt of a second session, slot 0" in reason
