"""Checkpoints inside a prefill: where, and what they will cost, known before any is taken."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_audit.prefix.snapshot import Snapshot
from mlx_audit.prefix.snapshot_compare import differences
from mlx_audit.prefix.snapshot_grid import Checkpoints, Costs, checkpoints
from prefix_models import MODELS, Run, subject, text


@pytest.mark.parametrize("family", MODELS)
@pytest.mark.parametrize("chunk", [1, 7])
def test_bytes_are_predicted_exactly_at_every_position(family: str, chunk: int) -> None:
    sample = Run(subject(family)).feed_all([text(6)])
    costs = Costs.of(sample.caches, 6)
    run, tokens = Run(subject(family)), text(21)
    for start in range(0, 21, chunk):
        run.feed(tokens[start : start + chunk])
        if run.position >= 4:
            predicted = costs.at(run.position, last=chunk)
            assert predicted == Snapshot.take(run.caches, run.position).nbytes, f"at {run.position}"


def test_a_sample_may_be_lazy() -> None:
    import mlx.core as mx
    from mlx_lm.models.cache import make_prompt_cache

    model = subject("falcon_h1")
    lazy, real = make_prompt_cache(model), Run(model).feed_all([text(8)])
    model(mx.array([text(8)]), cache=lazy)
    assert Costs.of(lazy, 8).at(500) == Costs.of(real.caches, 8).at(500) > 0


def test_positions_lie_on_a_grid_that_prompts_share_and_end_one_before_the_last_token() -> None:
    assert checkpoints(1000, lambda position: 1) == Checkpoints((256, 512, 768, 999), 4)
    assert checkpoints(1025, lambda position: 1).positions == (256, 512, 768, 1024)
    assert checkpoints(1000, lambda position: 1, start=300).positions == (512, 768, 999)
    assert checkpoints(1000, lambda position: 1, start=256).positions == (512, 768, 999)
    assert checkpoints(2, lambda position: 1).positions == (1,)
    assert checkpoints(1, lambda position: 1) == Checkpoints((), 0)
    assert checkpoints(10, lambda position: 1, start=9) == Checkpoints((), 0)


def test_limits_widen_the_grid_and_spare_the_boundary_until_the_last() -> None:
    assert checkpoints(10_000, lambda position: 1, most=4).positions == (4096, 8192, 9999)
    assert checkpoints(1000, lambda position: position, max_bytes=2000) == Checkpoints((512, 999), 1511, 2)
    assert checkpoints(1000, lambda position: position, max_bytes=999) == Checkpoints((999,), 999, 3)
    assert checkpoints(1000, lambda position: position, max_bytes=998) == Checkpoints((), 0, 4)


@given(
    length=st.integers(1, 5000),
    start=st.integers(0, 5000),
    stride=st.integers(1, 600),
    most=st.integers(1, 12),
    budget=st.none() | st.integers(0, 20_000),
)
def test_limits_hold(length: int, start: int, stride: int, most: int, budget: int | None) -> None:
    found = checkpoints(
        length, lambda position: 10 + position, start=start, stride=stride, most=most, max_bytes=budget
    )
    assert len(found.positions) <= most
    assert budget is None or found.nbytes <= budget
    assert found.nbytes == sum(10 + position for position in found.positions)
    assert list(found.positions) == sorted(set(found.positions))
    assert all(start < position < length for position in found.positions)
    if found.positions:
        assert found.positions[-1] == length - 1
        assert all(position % stride == 0 for position in found.positions[:-1])


def test_checkpoints_of_a_recurrent_prefill_serve_later_prompts() -> None:
    tokens, model = text(50), subject("qwen3_next")
    run, stored = Run(model), {}
    costs = Costs.of(Run(model).feed_all([tokens[:8]]).caches, 8)
    grid = checkpoints(40, costs.at, stride=16)
    for position in grid.positions:
        run.feed(tokens[run.position : position])
        stored[position] = Snapshot.take(run.caches, position)
    assert sum(snapshot.nbytes for snapshot in stored.values()) == grid.nbytes
    assert list(stored) == [16, 32, 39]
    other = tokens[:33] + text(9, seed=4)
    cold = Run(model).feed_all([other[:16], other[16:32]])
    hot = Run(model, stored[32].restore(), 32)
    assert hot.feed(other[32:]) == cold.feed(other[32:])
    assert differences(hot.caches, cold.caches, len(other)) == []
