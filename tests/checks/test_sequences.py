"""STA006: healthy stacks hold their tokens after any order of operations; faults of an order are seen, in few words."""

from __future__ import annotations

import pytest

from audited import green, healthy, new_subject, red
from kind_models import KINDS, kind_subject
from mlx_audit.checks.base import CheckFailed
from mlx_audit.checks.operations import Operation, Player, known, play_shortest, told
from mlx_audit.faults import FAULTS

Patch = pytest.MonkeyPatch


@pytest.mark.parametrize("kind", ["linear", *KINDS])
def test_healthy(kind: str) -> None:
    figures = green("STA006", kind_subject(kind) if kind in KINDS else healthy()).figures
    assert figures["sequences"] >= 6
    assert figures["compared"] > 30


ORDERS = {
    "copies_share_after_a_trim": ("linear", "trim 1; copy"),
    "saved_at_the_highest_position": (
        "linear",
        "trim 1; reload: session.safetensors: position of cache 0 does not fit",
    ),
    "room_of_trimmed_tokens_is_lost": (
        "linear",
        "prefill 2; trim 1: 1 tokens held and room for 27 at the end",
    ),
    "trim_leaves_the_count_of_the_host": ("rotating", "trim 1: rotating of 8 stands at"),
    "adopted_ring_has_not_turned": (
        "rotating",
        "hand_over 2; trim 1: rotating of 8: trim(1) of 9 returned 1, wanted 0",
    ),
    "a_second_load_gives_the_first": ("arrays", "reload: the way through a file changed the state"),
    "failed_extend_after_a_trim_counts": (
        "quantized",
        "trim 1; overflow: a refused call moved the position",
    ),
}
"""Faults that only an order of operations shows, with a kind of cache and what is said of them."""


@pytest.mark.parametrize("fault", ORDERS)
def test_red_in_one_order_alone(fault: str, monkeypatch: Patch) -> None:
    kind, words = ORDERS[fault]
    subject = kind_subject(kind) if kind in KINDS else new_subject()
    FAULTS[fault](monkeypatch)
    result = red("STA006", subject)
    assert words in result.reason
    operations = result.figures["operations"]
    assert result.reason.startswith("; ".join(operations) + ": ")
    assert len(operations) <= 5


def test_the_same_fault_is_told_in_the_same_words(monkeypatch: Patch) -> None:
    FAULTS["saved_at_the_highest_position"](monkeypatch)
    assert red("STA006", new_subject()).reason == red("STA006", new_subject()).reason


def test_each_fault_of_an_order_is_tried() -> None:
    assert set(ORDERS) == {name for name, found in FAULTS.items() if found.by == "STA006"}


@pytest.mark.parametrize("code", ["STA002", "STA003", "STA004", "STA005", "LIF001"])
def test_what_one_call_shows_is_not_what_it_is_for(code: str, monkeypatch: Patch) -> None:
    for fault in (
        "copies_share_after_a_trim",
        "saved_at_the_highest_position",
        "failed_extend_after_a_trim_counts",
    ):
        FAULTS[fault](monkeypatch)
    green(code, healthy())


OTHERS = {
    ("linear", "failed_step_advances"): "fail: a failed step moved the position to 2, wanted 1",
    ("linear", "saved_without_position"): "reload",
    ("linear", "refused_call_counts"): "overflow: a refused call moved the position",
    ("rotating", "session_trims_what_can"): "trim",
    ("keeping", "ring_handed_over_in_slot_order"): "hand_over",
    ("chunked", "chunk_edge_one_late"): "chunked of 8: at position",
    ("quantized", "quantized_without_biases"): "hand_over",
    ("composite_of_slots", "composite_trims_its_last_part"): "trim",
}


@pytest.mark.parametrize(("kind", "fault"), OTHERS)
def test_red(kind: str, fault: str, monkeypatch: Patch) -> None:
    subject = kind_subject(kind) if kind in KINDS else new_subject()
    FAULTS[fault](monkeypatch)
    result = red("STA006", subject)
    assert OTHERS[kind, fault] in result.reason
    assert result.figures["operations"][0].startswith("prefill")


class _Shelf(Player):
    """Fails once seven tokens were read after a copy."""

    def __init__(self) -> None:
        super().__init__()
        self.read, self.counts = 0, False

    def duplicate(self) -> None:
        self.counts = True

    def prefill(self, tokens: int) -> None:
        self.read = 0

    def extend(self, tokens: int) -> None:
        self.read += tokens * self.counts

    def finish(self) -> None:
        if self.read >= 7:
            raise CheckFailed(f"{self.read} read")


def test_a_sequence_is_made_as_short_as_it_can_be() -> None:
    names = [
        ("prefill", 9),
        ("extend", 4),
        ("copy", 0),
        ("extend", 5),
        ("other", 0),
        ("extend", 9),
        ("copy", 0),
    ]
    with pytest.raises(CheckFailed) as failed:
        play_shortest(_Shelf, [Operation(*name) for name in names])
    assert failed.value.reason == "prefill 1; copy; extend 4; extend 4: 8 read"
    assert failed.value.figures == {"operations": ["prefill 1", "copy", "extend 4", "extend 4"]}


def test_every_operation_is_among_those_that_are_never_left_out() -> None:
    operations = [operation for text in known(8) for operation in text]
    assert all(text[0].name == "prefill" for text in known(1))
    assert {operation.name for operation in operations} == {
        *("prefill", "step", "extend", "trim", "copy", "other", "reload", "hand_over", "overflow", "fail")
    }
    assert told(known(8)[0]).startswith("prefill 6; extend 1; step; trim 2; copy; step; other;")
