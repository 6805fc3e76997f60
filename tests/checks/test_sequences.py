"""STA006: healthy stacks hold their tokens after any order of operations; faults of an order are seen, in few words."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import pytest

from audited import green, healthy, new_subject, red
from kind_models import KINDS, kind_subject
from mlx_audit.caches.ring import RingCache
from mlx_audit.caches.slots import SlottedCache
from mlx_audit.checks.base import CheckFailed
from mlx_audit.checks.operations import Operation, Player, known, play_shortest, told
from mlx_audit.decode import CompiledDecodeSession as Session
from mlx_audit.decode import session as sessions
from mlx_audit.decode.saved import SavedState
from mlx_audit.faults import FAULTS

Patch = pytest.MonkeyPatch


@pytest.mark.parametrize("kind", ["linear", *KINDS])
def test_healthy(kind: str) -> None:
    figures = green("STA006", kind_subject(kind) if kind in KINDS else healthy()).figures
    assert figures["sequences"] >= 6
    assert figures["compared"] > 30


# Faults that only an order of operations shows.


def copies_share_after_a_trim(patch: Patch) -> None:
    """A session that was trimmed goes on as one with its copy."""
    own_trim, own_copy = Session.trim, Session.copy

    def trim(self: Session, n: int) -> int:
        self._trimmed = own_trim(self, n)  # type: ignore[attr-defined]
        return self._trimmed  # type: ignore[attr-defined, no-any-return]

    patch.setattr(Session, "trim", trim)
    patch.setattr(Session, "copy", lambda self: self if getattr(self, "_trimmed", 0) else own_copy(self))


def saved_at_the_highest_position(patch: Patch) -> None:
    """What is saved counts tokens that were taken back."""
    own_trim = Session.trim

    def trim(self: Session, n: int) -> int:
        self._highest = max(self.position, getattr(self, "_highest", 0))  # type: ignore[attr-defined]
        return own_trim(self, n)

    def save(self: Session, path: Any) -> None:
        position = self._position
        self._position = max(position, getattr(self, "_highest", 0))
        sessions.save_state(path, self._step, self._require_state("save"), self._position)
        self._position = position

    patch.setattr(Session, "trim", trim)
    patch.setattr(Session, "save", save)


def room_of_trimmed_tokens_is_lost(patch: Patch) -> None:
    """Tokens that were taken back still count against the capacity."""
    own_trim, own_remaining = Session.trim, Session.remaining

    def trim(self: Session, n: int) -> int:
        done = own_trim(self, n)
        self._spent = getattr(self, "_spent", 0) + done  # type: ignore[attr-defined]
        return done

    patch.setattr(Session, "trim", trim)
    patch.setattr(
        Session,
        "remaining",
        property(lambda self: own_remaining.fget(self) - getattr(self, "_spent", 0)),  # type: ignore[attr-defined]
    )


def trim_leaves_the_hosts_count(patch: Patch) -> None:
    """The cache's position goes back, and what the host knows of it doesn't."""
    own = SlottedCache.trim

    def trim(self: SlottedCache, n: int) -> int:
        held = self.count()
        done = own(self, n)
        self._held = held
        return done

    patch.setattr(SlottedCache, "trim", trim)


def adopted_ring_has_not_turned(patch: Patch) -> None:
    """A ring knows from its own writes alone that it has turned: one that is adopted says that it can trim."""
    own = RingCache.update_and_fetch

    def update_and_fetch(self: RingCache, keys: mx.array, values: mx.array) -> Any:
        self._turned = getattr(self, "_turned", False) or (  # type: ignore[attr-defined]
            (self.count() or 0) + keys.shape[2] > self.slots
        )
        return own(self, keys, values)

    patch.setattr(RingCache, "update_and_fetch", update_and_fetch)
    patch.setattr(RingCache, "_can_forget", lambda self, n: not getattr(self, "_turned", False))


def a_second_load_gives_the_first(patch: Patch) -> None:
    """What was loaded is remembered by its layout, and given again for the next file."""
    own, known_states = SavedState.state_for, dict[str, Any]()

    def state_for(self: SavedState, step: Any) -> Any:
        state = own(self, step)
        layout = str([[(a.shape, a.dtype) for a in arrays] for arrays in state])
        return known_states.setdefault(layout, state)

    patch.setattr(SavedState, "state_for", state_for)


def failed_extend_after_a_trim_counts(patch: Patch) -> None:
    """After a trim, a continuation that fails has moved the position already."""
    own_trim, own_extend = Session.trim, Session.extend

    def trim(self: Session, n: int) -> int:
        self._back = own_trim(self, n)  # type: ignore[attr-defined]
        return self._back  # type: ignore[attr-defined, no-any-return]

    def extend(self: Session, tokens: Any) -> mx.array:
        try:
            return own_extend(self, tokens)
        except BaseException:
            self._position += bool(getattr(self, "_back", 0))
            raise

    patch.setattr(Session, "trim", trim)
    patch.setattr(Session, "extend", extend)


LOCAL: dict[Callable[[Patch], None], tuple[str, str]] = {
    copies_share_after_a_trim: ("linear", "trim 1; copy"),
    saved_at_the_highest_position: ("linear", "trim 1; reload: "),
    room_of_trimmed_tokens_is_lost: ("linear", "prefill 2; trim 1: 1 tokens held and room for 27 at the end"),
    trim_leaves_the_hosts_count: ("rotating", "trim 1: rotating of 8 stands at"),
    adopted_ring_has_not_turned: (
        "rotating",
        "hand_over 2; trim 1: rotating of 8: trim(1) of 9 returned 1, wanted 0",
    ),
    a_second_load_gives_the_first: ("arrays", "reload: the way through a file changed the state"),
    failed_extend_after_a_trim_counts: ("quantized", "trim 1; overflow: a refused call moved the position"),
}


@pytest.mark.parametrize("plant", LOCAL, ids=lambda plant: plant.__name__)
def test_red_in_one_order_alone(plant: Callable[[Patch], None], monkeypatch: Patch) -> None:
    kind, words = LOCAL[plant]
    subject = kind_subject(kind) if kind in KINDS else new_subject()
    plant(monkeypatch)
    result = red("STA006", subject)
    assert words in result.reason
    operations = result.figures["operations"]
    assert result.reason.startswith("; ".join(operations) + ": ")
    assert len(operations) <= 5


@pytest.mark.parametrize("code", ["STA002", "STA003", "STA004", "STA005", "LIF001"])
def test_what_one_call_shows_is_not_what_it_is_for(code: str, monkeypatch: Patch) -> None:
    for plant in (
        copies_share_after_a_trim,
        saved_at_the_highest_position,
        failed_extend_after_a_trim_counts,
    ):
        plant(monkeypatch)
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
