"""The table of restore rules says what the code does, and each reason has its one line."""

from __future__ import annotations

import re
from typing import Any

import pytest
from mlx_lm.models.cache import ArraysCache, CacheList, KVCache, RotatingKVCache

from mlx_audit.prefix.layers import Layer
from mlx_audit.prefix.reasons import PrefixRefused, Reason
from mlx_audit.prefix.rules import RULES, Restorable, Trims, has_recurrence, refusal, table
from mlx_audit.prefix.snapshot import Snapshot, read_stack
from prefix_models import Run, prefilled, subject, text

RING = {"max_size": 16, "keep": 0, "_idx": 16}


def layer(kind: str, position: int, parameters: dict[str, int] | None = None, *parts: Layer) -> Layer:
    return Layer(kind, position, parameters or {}, (), parts)


@pytest.mark.parametrize(
    ("stored", "prefix", "reason"),
    [
        (layer("linear", 20), 1, None),
        (layer("concatenated", 20), 19, None),
        (layer("quantized", 20), 5, None),
        (layer("linear", 20), 21, Reason.POSITION_MISMATCH),
        (layer("linear", 20), 0, Reason.POSITION_MISMATCH),
        (layer("arrays", 20), 20, None),
        (layer("arrays", 20), 19, Reason.RECURRENT_OFF_BOUNDARY),
        (layer("rotating", 16, RING), 5, None),
        (layer("rotating", 17, RING), 17, None),
        (layer("rotating", 17, RING), 16, Reason.WRAPPED_RING),
        (layer("chunked", 20, {"chunk_size": 8, "start_position": 0}), 5, None),
        (layer("chunked", 20, {"chunk_size": 8, "start_position": 11}), 20, None),
        (layer("chunked", 20, {"chunk_size": 8, "start_position": 11}), 5, Reason.PARTIAL_TRIM),
        (layer("chunked", 20, {"chunk_size": 8, "start_position": 11}), 11, Reason.PARTIAL_TRIM),
        (layer("chunked", 20, {"chunk_size": 8, "start_position": 11}), 12, Reason.WINDOW_SLID),
        (layer("chunked", 20, {"chunk_size": 8, "start_position": 11}), 18, Reason.WINDOW_SLID),
        (layer("chunked", 20, {"chunk_size": 8, "start_position": 11}), 19, None),
        (layer("composite", 20, None, layer("linear", 20), layer("linear", 20)), 7, None),
        (
            layer("composite", 20, None, layer("linear", 20), layer("arrays", 20)),
            7,
            Reason.RECURRENT_OFF_BOUNDARY,
        ),
        (layer("composite", 20, None, layer("rotating", 20, RING)), 19, Reason.WRAPPED_RING),
    ],
)
def test_each_kind_refuses_what_it_cannot_give_back(
    stored: Layer, prefix: int, reason: Reason | None
) -> None:
    found = refusal([layer("linear", 20), stored], prefix)
    if prefix not in (0, 21):
        assert (found and found.reason) is reason
        assert found is None or found.where.startswith("layer 1")
    else:
        assert found is not None
        assert found.reason is reason


def test_every_reason_that_a_rule_names_is_one_it_gives_and_no_other() -> None:
    for rule in RULES.values():
        wanted = {
            Trims.UNWRAPPED: {Reason.WRAPPED_RING},
            Trims.RETAINED: {Reason.PARTIAL_TRIM, Reason.WINDOW_SLID},
            Trims.NEVER: {Reason.RECURRENT_OFF_BOUNDARY},
        }.get(rule.trims, set())
        assert set(rule.refusals) == wanted, rule.kind
        assert (rule.restorable is Restorable.BOUNDARY) == (rule.trims is Trims.NEVER)
        assert rule.counts == (rule.kind not in ("arrays", "composite"))


def test_the_table_has_a_row_for_each_rule() -> None:
    rows = table().splitlines()[2:]
    assert [row.split(" | ")[0].strip("| ") for row in rows] == list(RULES)
    assert all(row.count("|") == 7 for row in table().splitlines())
    assert "`recurrent-off-boundary`" in table()


def test_recurrence_is_found_inside_composites() -> None:
    assert has_recurrence([layer("composite", 3, None, layer("composite", 3, None, layer("arrays", 3)))])
    assert not has_recurrence([layer("composite", 3, None, layer("linear", 3)), layer("rotating", 3, RING)])


def test_reasons_are_stable_codes_with_one_line_each() -> None:
    assert {
        *("miss", "exact-replay-bypass", "below-minimum", "recurrent-off-boundary", "window-slid"),
        *("wrapped-ring", "partial-trim", "unknown-class", "key-mismatch", "format-version"),
        *("position-mismatch", "multimodal", "leased"),
    } <= {reason.value for reason in Reason}
    meanings = [reason.meaning for reason in Reason]
    assert len(set(meanings)) == len(meanings)
    for reason in Reason:
        assert re.fullmatch(r"[a-z]+(-[a-z]+)*", reason.value)
        assert 10 < len(reason.meaning) < 90
        assert "\n" not in reason.meaning
        assert Reason(reason.value) is reason
        assert str(PrefixRefused(reason)) == f"{reason.value}: {reason.meaning}"


def test_a_chunked_cache_refuses_the_cut_that_mlx_lm_answers_in_part() -> None:
    tokens = text(20)
    run = Run(subject("llama4")).feed_all([[token] for token in tokens])
    snapshot = Snapshot.take(run.caches, 20)
    assert [cache.trim(15) for cache in run.twin().caches] == [9, 9, 9, 15], "mlx-lm: offsets 11 and 5"
    for prefix, reason in ((5, Reason.PARTIAL_TRIM), (13, Reason.WINDOW_SLID)):
        with pytest.raises(PrefixRefused) as caught:
            snapshot.restore(prefix)
        assert caught.value.reason is reason
        assert "layer 0 (chunked)" in str(caught.value)


def test_a_wrapped_ring_inside_a_composite_refuses_and_restores_with_its_cursor() -> None:
    ring, state = RotatingKVCache(16, keep=2), ArraysCache(1)
    for _ in range(40):
        ring.update_and_fetch(*rows())
    state[0] = rows()[0]
    stack: list[Any] = [CacheList(CacheList(ring), KVCache())]
    stack[0].caches[1].update_and_fetch(*rows(40))
    layers, _ = read_stack(stack, 40)
    found = refusal(layers, 36)
    assert found is not None
    assert (found.reason, found.where) == (Reason.WRAPPED_RING, "layer 0 part 0 part 0 (rotating)")
    [restored] = Snapshot.take(stack, 40).restore()
    inner = restored.caches[0].caches[0]
    assert (inner.offset, inner._idx, inner.keep, inner.max_size) == (40, ring._idx, 2, 16)
    assert 2 < ring._idx < 16


def test_a_cut_of_a_ring_that_has_not_turned_is_exact() -> None:
    run, tokens = prefilled("gemma3_text", 15), text(15)
    hot = Run(run.model, Snapshot.take(run.caches, 15).restore(9), 9)
    cold = Run(run.model).feed_all([tokens[:9]])
    assert hot.feed(tokens[9:]) == cold.feed(tokens[9:])


def rows(count: int = 1) -> tuple[Any, Any]:
    import mlx.core as mx

    keys = mx.random.normal((1, 2, count, 8))
    return keys, keys + 1
