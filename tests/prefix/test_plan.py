"""What a query may take up from one entry: by policy, never the whole query, never a state of another length."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_audit.prefix.layers import Layer
from mlx_audit.prefix.plan import MARGIN, Plan, Policy, best, plan
from mlx_audit.prefix.reasons import PrefixRefused, Reason
from mlx_audit.prefix.rules import refusal
from mlx_audit.prefix.snapshot import Snapshot
from mlx_audit.prefix.snapshot_compare import differences
from prefix_models import Run, prefilled, subject, text

WINDOW = 16


def stack(kind: str, length: int) -> list[Layer]:
    """Return the layers of an entry of a family of caches."""
    linear = Layer("linear", length)
    ring = Layer("rotating", length, {"max_size": WINDOW, "keep": 0, "_idx": min(length, WINDOW)})
    chunk = Layer("chunked", length, {"chunk_size": 8, "start_position": max(0, length - 9)})
    other = {
        "kv": linear,
        "rot": ring,
        "hyb": Layer("arrays", length),
        "chk": chunk,
        "list": Layer("composite", length, {}, (), (Layer("arrays", length), linear)),
    }[kind]
    return [linear, other]


@pytest.mark.parametrize("kind", ["hyb", "list"])
def test_a_grid_of_16_serves_15_to_33_tokens_below_their_end(kind: str) -> None:
    lengths = (15, 16, 17, 31, 32, 33)
    entries = {16, 32}
    planned = []
    for query in lengths:
        plans = [plan(stack(kind, entry), query=query, shared=entry) for entry in entries if entry <= query]
        planned.append(best(plans, query).prefix)
    assert planned == [0, 0, 16, 16, 16, 32]


@pytest.mark.parametrize("family", ["qwen3_next", "mamba2"])
def test_a_grid_of_16_is_equal_to_cold_and_an_old_state_at_the_boundary_is_not(family: str) -> None:
    for query in (17, 31, 32, 33):
        entry = (query - 1) // 16 * 16
        tokens = text(query)
        cold = prefilled(family, entry)
        hot = Run(cold.model, Snapshot.take(cold.caches, entry).restore(), entry)
        assert hot.feed(tokens[entry:]) == cold.feed(tokens[entry:])
        assert differences(hot.caches, cold.caches, query) == []
    held = prefilled(family, 32)
    with pytest.raises(PrefixRefused) as caught:
        Snapshot.take(held.caches, 32).restore(31)
    assert caught.value.reason is Reason.RECURRENT_OFF_BOUNDARY


@pytest.mark.parametrize(
    ("kind", "entry", "query", "prefix", "reason"),
    [
        # A query that equals a stored boundary, and one that extends it.
        ("kv", 29, 30, 29, None),
        ("kv", 29, 29, 28, Reason.LAST_TOKEN_FED),
        ("kv", 10, 10, 9, Reason.LAST_TOKEN_FED),
        ("rot", 29, 30, 29, None),
        ("rot", 29, 29, 0, Reason.WRAPPED_RING),
        ("rot", 10, 10, 9, Reason.LAST_TOKEN_FED),
        ("hyb", 29, 30, 29, None),
        ("hyb", 29, 29, 0, Reason.EXACT_REPLAY_BYPASS),
        ("hyb", 10, 10, 0, Reason.EXACT_REPLAY_BYPASS),
        ("list", 10, 10, 0, Reason.EXACT_REPLAY_BYPASS),
        ("chk", 29, 29, 28, Reason.LAST_TOKEN_FED),
    ],
)
def test_the_suffix_is_never_empty(
    kind: str, entry: int, query: int, prefix: int, reason: Reason | None
) -> None:
    found = plan(stack(kind, entry), query=query, shared=entry)
    assert (found.prefix, found.suffix, found.reason) == (prefix, query - prefix, reason)


@pytest.mark.parametrize(
    ("kind", "entry", "query", "shared", "prefix", "reason"),
    [
        ("kv", 40, 30, 20, 20, None),
        ("kv", 40, 30, 0, 0, Reason.MISS),
        ("kv", 40, 1, 1, 0, Reason.BELOW_MINIMUM),
        ("hyb", 40, 60, 20, 0, Reason.RECURRENT_OFF_BOUNDARY),
        ("rot", 60, 80, 56, 0, Reason.WRAPPED_RING),
        ("rot", 60, 80, 60, 60, None),
        ("rot", 16, 80, 5, 5, None),
        ("chk", 20, 6, 5, 0, Reason.PARTIAL_TRIM),
        ("chk", 20, 30, 13, 0, Reason.WINDOW_SLID),
    ],
)
def test_a_part_of_an_entry_is_taken_only_where_every_layer_can_be_cut(
    kind: str, entry: int, query: int, shared: int, prefix: int, reason: Reason | None
) -> None:
    found = plan(stack(kind, entry), query=query, shared=shared)
    assert (found.prefix, found.reason, found.hit) == (prefix, reason, prefix > 0)
    told = reason not in (None, Reason.MISS, Reason.BELOW_MINIMUM)
    assert found.where.startswith("layer 1 (") if told else found.where == ""


@pytest.mark.parametrize(
    ("kind", "entry", "query", "shared", "prefix", "reason"),
    [
        ("kv", 100, 100, 100, 84, Reason.MARGIN),
        ("kv", 50, 100, 50, 50, None),
        ("kv", 50, 16, 16, 0, Reason.BELOW_MINIMUM),
        ("hyb", 100, 100, 100, 0, Reason.EXACT_REPLAY_BYPASS),
        ("hyb", 120, 100, 100, 0, Reason.EXACT_REPLAY_BYPASS),
        ("hyb", 84, 100, 84, 84, None),
        ("hyb", 90, 100, 90, 0, Reason.RECURRENT_OFF_BOUNDARY),
        ("rot", 100, 100, 100, 0, Reason.WRAPPED_RING),
        ("rot", 16, 17, 16, 1, Reason.MARGIN),
    ],
)
def test_the_margin_keeps_16_tokens_out(
    kind: str, entry: int, query: int, shared: int, prefix: int, reason: Reason | None
) -> None:
    found = plan(stack(kind, entry), query=query, shared=shared, policy=Policy.MARGIN)
    assert (found.prefix, found.reason) == (prefix, reason)
    assert MARGIN == 16


def test_a_minimum_is_asked_for_the_tokens_that_are_left() -> None:
    assert plan(stack("kv", 9), query=20, shared=9, minimum=10).reason is Reason.BELOW_MINIMUM
    assert plan(stack("kv", 10), query=20, shared=10, minimum=10).prefix == 10
    assert plan(stack("kv", 10), query=10, shared=10, minimum=10).reason is Reason.BELOW_MINIMUM


@pytest.mark.parametrize(("query", "shared"), [(0, 0), (5, 6), (20, 11), (5, -1)])
def test_what_cannot_be_shared_is_refused(query: int, shared: int) -> None:
    with pytest.raises(PrefixRefused) as caught:
        plan(stack("kv", 10), query=query, shared=shared)
    assert caught.value.reason is Reason.KEY_MISMATCH


def test_the_best_of_several_plans_is_the_longest_and_a_refusal_tells_more_than_a_miss() -> None:
    miss, refused = Plan(0, 20, 30, Reason.MISS), Plan(0, 20, 25, Reason.WRAPPED_RING, "layer 1")
    hit, longer = Plan(4, 16, 4), Plan(9, 11, 12, None)
    assert best([miss, refused], 20) is refused
    assert best([hit, longer, refused, miss], 20) is longer
    assert best([], 20) == Plan(0, 20, 0, Reason.MISS)


@given(data=st.data())
def test_every_plan_obeys_the_rules(data: Any) -> None:
    kind = data.draw(st.sampled_from(["kv", "rot", "hyb", "chk", "list"]), label="kind")
    entry = data.draw(st.integers(1, 60), label="entry")
    query = data.draw(st.integers(1, 60), label="query")
    shared = data.draw(st.integers(0, min(entry, query)), label="shared")
    policy = data.draw(st.sampled_from(Policy), label="policy")
    layers = stack(kind, entry)
    found = plan(layers, query=query, shared=shared, policy=policy)
    assert found.prefix + found.suffix == query
    assert found.suffix >= (MARGIN if policy is Policy.MARGIN and found.hit else 1)
    assert found.prefix <= shared
    assert (found.reason is None) == (found.prefix == shared > 0)
    assert not found.hit or refusal(layers, found.prefix) is None
    if kind in ("hyb", "list"):
        assert found.prefix in (0, entry)


def test_a_planned_prefix_is_what_every_restored_layer_counts() -> None:
    tokens = text(30)
    for family in ("llama", "gemma3_text", "llama4"):
        run = Run(subject(family)).feed_all([tokens[:12]])
        snapshot = Snapshot.take(run.caches, 12)
        found = plan(snapshot.layers, query=12, shared=12)
        assert found.prefix == 11
        assert {cache.offset for cache in snapshot.restore(found.prefix)} == {11}
