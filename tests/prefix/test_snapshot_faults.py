"""Planted faults of a restore: the comparison of states sees every one; logits alone miss some."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import ArraysCache, RotatingKVCache

from mlx_audit.prefix.reasons import PrefixRefused, Reason
from mlx_audit.prefix.snapshot import Snapshot
from mlx_audit.prefix.snapshot_compare import differences
from prefix_models import Run, prefilled, text

LONG = 32


def recurrent(caches: list[Any]) -> list[int]:
    return [index for index, cache in enumerate(caches) if type(cache) is ArraysCache]


def stale(tokens: int) -> Callable[[Run], list[Any]]:
    """Recurrences that have not seen the last tokens, beside attention that has."""

    def plant(run: Run) -> list[Any]:
        caches = Snapshot.take(run.caches, run.position).restore()
        early = Run(run.model).feed_all([text(run.position - tokens)]).caches
        for index in recurrent(caches):
            caches[index] = early[index]
        return caches

    return plant


def cursor_off(run: Run) -> list[Any]:
    caches = Snapshot.take(run.caches, run.position).restore()
    for cache in caches:
        if type(cache) is RotatingKVCache:
            cache._idx -= 1
    return caches


def wrong_layer(run: Run) -> list[Any]:
    caches = Snapshot.take(run.caches, run.position).restore()
    caches[0], caches[2] = caches[2], caches[0]
    return caches


def reset_arrays(run: Run) -> list[Any]:
    caches = Snapshot.take(run.caches, run.position).restore()
    for index in recurrent(caches):
        caches[index].cache = [mx.zeros_like(array) for array in caches[index].cache]
    return caches


def trimmed_by_force(run: Run) -> list[Any]:
    """What mlx-lm's `trim` makes of a run four tokens longer."""
    longer = run.twin()
    longer.feed_all([[token] for token in text(run.position + 4)[run.position :]])
    for cache in longer.caches:
        cache.trim(4)
    return longer.caches


PLANTED: list[tuple[str, str, Callable[[Run], list[Any]]]] = [
    ("stale by 1", "mamba2", stale(1)),
    ("stale by 3", "mamba2", stale(3)),
    ("stale by 1", "qwen3_next", stale(1)),
    ("stale by 3", "qwen3_next", stale(3)),
    ("cursor off", "gemma3_text", cursor_off),
    ("forced trim", "gemma3_text", trimmed_by_force),
    ("wrong layer", "llama", wrong_layer),
    ("wrong layer", "mamba2", wrong_layer),
    ("reset arrays", "qwen3_next", reset_arrays),
    ("reset arrays", "mamba2", reset_arrays),
]


@pytest.mark.parametrize(("fault", "family", "plant"), PLANTED, ids=[f"{f}-{m}" for f, m, _ in PLANTED])
def test_states_tell(fault: str, family: str, plant: Callable[[Run], list[Any]]) -> None:
    cold = prefilled(family, 24, 16)
    healthy = Snapshot.take(cold.caches, cold.position).restore()
    assert differences(healthy, cold.caches, cold.position) == []
    found = differences(plant(cold), cold.caches, cold.position)
    assert found, f"{fault} in {family} was not seen"
    assert all(difference.where.startswith("layer") for difference in found)


def test_logits_after_a_long_suffix_miss_what_states_tell() -> None:
    """An order of magnitude for what each check reads with a state that is three tokens old."""
    cold = prefilled("mamba2", 24, 16)
    chunk = text(cold.position + LONG)[cold.position :]
    faulty = Run(cold.model, stale(3)(cold), cold.position)
    found = differences(faulty.caches, cold.caches, cold.position)
    assert max(float(difference.found.removeprefix("differs by ")) for difference in found) > 0.1
    near, far = (logits_apart(faulty.twin(), cold.twin(), chunk[:suffix]) for suffix in (1, LONG))
    assert near > 0.1, "the first token after the restore shows it"
    assert far < 1e-5, f"at suffix {LONG} any tolerance lets it pass"


def logits_apart(faulty: Run, cold: Run, chunk: list[int]) -> float:
    """Return how far the last logits are from the cold run's."""
    found, wanted = (
        run.model(mx.array([chunk]), cache=run.caches)[0, -1].astype(mx.float32) for run in (faulty, cold)
    )
    return float(mx.abs(found - wanted).max())


def test_a_borrowed_container_is_seen_as_soon_as_its_owner_goes_on() -> None:
    owner = prefilled("mamba2", 24)
    snapshot = Snapshot.take(owner.caches, 24)
    borrowed = [ArraysCache.from_state(cache.state) for cache in owner.caches]
    kept = prefilled("mamba2", 24)
    assert differences(borrowed, kept.caches, 24) == []
    owner.feed(text(26)[24:])
    assert differences(borrowed, kept.caches, 24), "mlx-lm's own state is the list itself"
    assert differences(snapshot.restore(), kept.caches, 24) == []


def test_a_ring_refuses_the_cut_that_force_gets_wrong() -> None:
    tokens = text(61)
    run = prefilled("gemma3_text", 40, 20)
    snapshot = Snapshot.take(run.caches, 60)
    with pytest.raises(PrefixRefused) as caught:
        snapshot.restore(56)
    assert caught.value.reason is Reason.WRAPPED_RING
    assert "layer 0 (rotating)" in str(caught.value)
    for suffix in (1, 5):
        hot, cold = Run(run.model, snapshot.restore(), 60), run.twin()
        assert hot.feed(tokens[:suffix]) == cold.feed(tokens[:suffix])
        assert differences(hot.caches, cold.caches, hot.position) == []
