"""Rows side by side, of equal and of different length."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from audited import green, healthy, mutated, new_subject, only, red
from mlx_audit.checks import ragged
from mlx_audit.checks.subject import Subject
from mlx_audit.faults import FAULTS
from tiny_models import FAMILIES, config_of


def sliding(**changes: Any) -> Subject:
    """Return a llama whose layers slide over 8 tokens and see all of them, in turn."""
    layers = ["sliding_attention", "full_attention"] * 2
    config = config_of("llama", layer_types=layers, sliding_window=8, **changes)
    return new_subject("llama", config=config, exactness="reordered")


CODES = ("PAR005", "MSK004", "MSK005")


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("code", CODES)
def test_healthy(code: str, family: str) -> None:
    green(code, healthy(family))


@pytest.mark.parametrize("code", CODES)
def test_rings_are_healthy(code: str) -> None:
    green(code, sliding())


def test_poison_is_written_into_rings_and_buffers() -> None:
    """Rows of 4, 13 and 9 tokens: a ring of 8 holds times 5 to 12, of which 4 and 0 pad the first and the last."""
    padding = ragged._Poison((4, 13, 9), 1.0)._padding(8)
    assert padding.sum(axis=1).tolist() == [4, 0, 0]
    assert ragged._Poison((4, 13, 9), 1.0)._padding(30).sum(axis=1).tolist() == [9, 0, 4]
    assert green("MSK005", sliding()).figures["windows"] == [8]


@pytest.mark.parametrize(
    ("fault", "code", "reason"),
    [
        ("rows_mixed", "PAR005", "logits differ at step 1 of a batch of 2"),
        ("rows_mixed", "MSK004", "logits differ at step 1, row 0 of lengths (3, 9), against its solo run"),
        (
            "left_padding_seen",
            "MSK004",
            "logits differ at step 1, row 0 of lengths (3, 9), against its solo run",
        ),
        ("left_padding_seen", "MSK005", "numbers in the padding moved the logits"),
        ("ragged_rows_in_reverse", "MSK004", "logits differ at step 1, row 0 of lengths (3, 9)"),
        ("position_of_the_longest_row_for_all", "MSK004", "logits differ at step 1, row 0 of lengths (3, 9)"),
        ("ids_beyond_the_lengths_are_read", "MSK004", "logits differ at step 1, row 0 of lengths (3, 9)"),
        ("ids_beyond_the_lengths_are_read", "MSK005", "other ids beyond the lengths moved the logits"),
    ],
)
@pytest.mark.parametrize("rings", [False, True])
def test_mixed_rows_are_red(
    fault: str, code: str, reason: str, rings: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    FAULTS[fault](monkeypatch)
    assert red(code, sliding() if rings else new_subject()).reason.startswith(reason)


@pytest.mark.parametrize(
    "fault",
    ["left_padding_seen", "ragged_rows_in_reverse", "position_of_the_longest_row_for_all"],
)
def test_rows_of_equal_length_hide_it(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    FAULTS[fault](monkeypatch)
    green("PAR005", new_subject())


def test_a_second_trace_is_red(monkeypatch: pytest.MonkeyPatch) -> None:
    FAULTS["traced_again_at_the_turn"](monkeypatch)
    assert "wanted 1" in red("MSK004", new_subject()).reason


def keeping(monkeypatch: pytest.MonkeyPatch) -> Subject:
    """Return a subject whose caches are rings that keep their first tokens."""
    from mlx_lm.models.cache import RotatingKVCache

    subject = sliding()
    own = subject.module.Model.make_cache
    monkeypatch.setattr(
        subject.module.Model,
        "make_cache",
        lambda self: [RotatingKVCache(8, 2) if hasattr(c, "keep") else c for c in own(self)],
    )
    return subject


@pytest.mark.parametrize("code", ["MSK004", "MSK005"])
def test_only_a_ring_that_keeps_its_first_tokens_may_refuse(
    code: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = only(code, keeping(monkeypatch))
    assert result.status == "not-applicable"
    assert "a ring that keeps its first tokens" in result.reason


@pytest.mark.parametrize("code", ["MSK004", "MSK005"])
def test_any_other_refusal_is_red(code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from mlx_audit.caches.slots import SlottedCache
    from mlx_audit.errors import ShapeMismatch

    def refuse(self: SlottedCache) -> None:
        raise ShapeMismatch("no", where="FixedCapacityKVCache.merge")

    monkeypatch.setattr(SlottedCache, "_require_mergeable", refuse)
    assert only(code, new_subject()).status == "fail"


def test_a_branch_on_many_rows_is_red(tmp_path: Path) -> None:
    rotated = "self.rope(queries, offset=cache.offset)"
    longest = "self.rope(queries, offset=mx.max(cache.offset) if B > 8 else cache.offset)"
    with_int = longest.replace("if B > 8", "if B > 8 and isinstance(cache.offset, mx.array)")
    subject = new_subject(module=mutated(tmp_path, (rotated, with_int)))
    assert "of lengths (1, 2, 3, 4, 1" in red("MSK004", subject).reason
