"""Public bug reports about rings, sliding windows and trimming, retold as small trials on tiny models."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import ConcatenateKVCache, trim_prompt_cache

from cache_oracle import (
    WIDTHS,
    adopted,
    chunked,
    composite,
    feed,
    feed_native,
    filled_native,
    linear,
    marks,
    rotating,
    wanted,
)
from mlx_audit.caches import FixedCapacityKVCache, kind_of
from mlx_audit.caches.chunked import FixedCapacityChunkedCache
from mlx_audit.caches.ring import RingCache
from mlx_audit.caches.rotating import FixedCapacityRotatingCache
from mlx_audit.decode import CompiledDecodeSession
from mlx_audit.errors import HostState
from tiny_models import Eager, distance, module_of, raw, state_bytes, tokens
from zoo_models import WINDOW, zoo_model

MENDED = (
    "mlx-lm has mended this: say so in the changelog, and let adoption take such a cache if it is exact now"
)
REORDERED = 1e-4


def _session(model: Any, capacity: int, **options: Any) -> CompiledDecodeSession:
    return CompiledDecodeSession(model, capacity, evidence="ignore", **options)


def _rising(count: int) -> list[int]:
    return list(range(1, count + 1))


def test_tt_xla_3688_a_sliding_layer_recompiles_at_every_token() -> None:
    """https://github.com/tenstorrent/tt-xla/pull/3688

    The layer kept its running length as an integer, in branches and in the size of its mask.
    """
    model, ids = zoo_model("llama"), tokens(23)
    session, eager = _session(model, 32), Eager(model)
    session.prefill([ids[:3]])
    eager.feed([ids[:3]])
    for count, token in enumerate(ids[3:], start=4):
        assert distance(session.step([token]), eager.feed([[token]])) < REORDERED
        assert (session.position, session.trace_count) == (count, 1)
    assert session.position > 3 * WINDOW


class Attention:
    """Notes for each query of a model's first layer which positions it attends to.

    Keys of the first layer depend on a token and its position alone, so a key tells its position by its value.
    """

    def __init__(self, family: str, ids: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
        self.model, module = zoo_model(family), module_of(family)
        self.layers, self.calls = len(self.model.layers), 0
        self.on = True
        self.seen: list[list[int]] = []
        eager = Eager(self.model)
        eager.feed([ids])
        # A ring that took its prompt in one piece still holds all of it.
        self.keys = np.array(eager.caches[0].keys[0]).swapaxes(0, 1).reshape(len(ids), -1)
        self.own = module.scaled_dot_product_attention
        monkeypatch.setattr(module, "scaled_dot_product_attention", self.noted)

    def noted(
        self,
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        cache: Any,
        scale: float,
        mask: Any,
        **rest: Any,
    ) -> mx.array:
        if self.on:
            assert not isinstance(mask, mx.array) or mask.shape[-1] == keys.shape[2] == values.shape[2]
            if self.calls % self.layers == 0:
                self.seen += self._positions(np.array(keys[0]).swapaxes(0, 1), mask, queries.shape[2])
            self.calls += 1
        return self.own(queries, keys, values, cache, scale, mask, **rest)

    def feed(self, ids: list[int], prompt: int, chunk: int) -> list[mx.array]:
        """Return logits of a session that reads a prompt, and then chunks; the step's function runs uncompiled."""
        self.on = False
        session = _session(self.model, len(ids))
        self.on = True
        mx.disable_compile()
        try:
            logits = [session.prefill([ids[:prompt]])]
            for start in range(prompt, len(ids), chunk):
                rows = [ids[start : start + chunk]]
                logits.append(session.extend(rows) if chunk > 1 else session.step(rows[0]))
        finally:
            mx.enable_compile()
        return logits

    def _positions(self, keys: np.ndarray, mask: Any, length: int) -> list[list[int]]:
        count = keys.shape[0]
        if isinstance(mask, mx.array):
            flags = np.broadcast_to(np.array(mask), (1, 1, length, count))[0, 0]
        else:
            flags = np.tri(length, count, count - length, dtype=bool)  # None and "causal" are the same
        gaps = np.abs(keys.reshape(count, 1, -1) - self.keys[None]).max(-1)
        for row in flags:
            assert (gaps.min(1)[row] < 1e-4).all()
        return [sorted(gaps.argmin(1)[row].tolist()) for row in flags]

    def take(self) -> list[list[int]]:
        """Return what was noted since the last call."""
        seen, self.seen = self.seen, []
        return seen


def _last(window: int, count: int) -> list[list[int]]:
    return [list(range(max(0, query - window + 1), query + 1)) for query in range(count)]


def test_mlx_lm_390_the_window_let_one_key_too_many_through(monkeypatch: pytest.MonkeyPatch) -> None:
    """https://github.com/ml-explore/mlx-lm/pull/390

    The bound was inclusive, and prefill and decode disagreed on whether the window counts the current token.
    """
    ids = tokens(21)
    attention = Attention("gpt_oss", ids, monkeypatch)
    for chunk in (21, 4, 1):
        eager = Eager(attention.model)
        for start in range(0, 21, chunk):
            eager.feed([ids[start : start + chunk]])
        assert attention.take() == _last(WINDOW, 21)
    for prompt, chunk in ((21, 4), (1, 1), (5, 4), (1, 9), (9, 12)):
        attention.feed(ids, prompt, chunk)
        assert attention.take()[-21:] == _last(WINDOW, 21)
    monkeypatch.undo()
    session, eager = _session(attention.model, 21), Eager(attention.model)
    assert distance(session.prefill([ids[:1]]), eager.feed([ids[:1]])) < REORDERED
    for token in ids[1:]:
        assert distance(session.step([token]), eager.feed([[token]])) < REORDERED


def test_d_inference_482_a_turned_ring_loses_most_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """https://github.com/Layr-Labs/d-inference/pull/482

    The window compared slots with positions. A query that sees nothing gives no NaN in MLX but the mean of all values.
    """
    ids = tokens(25)
    attention = Attention("gemma3_text", ids, monkeypatch)
    attention.feed(ids, 5, 1)
    seen = attention.take()[-25:]
    assert seen == _last(8, 25)
    assert all(seen)

    monkeypatch.setattr(RingCache, "_key_times", lambda self, N: mx.arange(self._rung))  # the fault itself
    attention.feed(ids, 5, 1)
    assert attention.take()[-25:] != _last(8, 25)


@pytest.mark.parametrize("chunk", range(1, WINDOW + 3))
def test_mlx_swift_lm_39_mask_and_keys_differ_in_width(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """https://github.com/ml-explore/mlx-swift-lm/pull/39

    The mask's width came from the offset, that of the keys from the cut ring.
    """
    ids = tokens(2 * WINDOW + 2)
    attention = Attention("gpt_oss", ids, monkeypatch)  # which compares the widths at each call
    for prompt in (WINDOW - 1, WINDOW, WINDOW + 1, 2 * WINDOW + 1):
        logits = attention.feed(ids[: prompt + 1], prompt, 1)
        attention.feed(ids[:prompt], 1, chunk)
        eager = Eager(attention.model)
        wanted_logits = eager.feed([ids[:prompt]]), eager.feed([ids[prompt : prompt + 1]])
        for got, want in zip(logits, wanted_logits, strict=True):
            assert distance(got, want) < REORDERED
    assert attention.calls > 4 * attention.layers


def test_mlx_lm_1776_a_turned_ring_is_cut_although_it_says_it_cannot_be() -> None:
    """https://github.com/ml-explore/mlx-lm/issues/1776

    `trim` does not ask `is_trimmable`; the write index becomes negative, and the next write destroys another token.
    """
    native = filled_native(rotating(8), [_rising(20)], 1)
    assert not native.is_trimmable()
    assert native.trim(6) == 6, MENDED
    assert (native.offset, native._idx) == (14, -2), MENDED
    with pytest.raises(HostState, match="cut after it had turned"):
        FixedCapacityRotatingCache.adopt(native, 40)

    for held, n, left in ((20, 6, 20), (7, 6, 1), (8, 6, 2), (9, 6, 9)):
        kind = rotating(8)
        cache = adopted(kind, [_rising(held)], 1, 40)
        before = [raw(array) for array in cache.state]
        assert cache.trim(n) == held - left
        assert (left < held) or [raw(array) for array in cache.state] == before
        assert feed(cache, kind, [[99]]) == wanted(kind, [[*_rising(left), 99]], 1)


def test_a_session_over_rings_forgets_before_they_turn_and_not_after() -> None:
    model, ids = zoo_model("llama"), tokens(20)
    session = _session(model, 30)
    session.prefill([ids[:4]])
    for token in ids[4:WINDOW]:
        session.step([token])
    assert session.trim(3) == 3
    eager = Eager(model)
    eager.feed([ids[: WINDOW - 3]])
    for token in reversed(ids):
        assert distance(session.step([token]), eager.feed([[token]])) < REORDERED
    before = state_bytes(session)
    assert (session.trim(1), session.position) == (0, WINDOW - 3 + 20)
    assert state_bytes(session) == before


def test_mlx_lm_1494_a_reused_prompt_cache_does_not_match_its_key() -> None:
    """https://github.com/ml-explore/mlx-lm/issues/1494

    One layer forgets less than another, and only the first layer's count is returned.
    """
    both = composite(linear(), chunked(4))
    native = [linear().native(), chunked(4).native()]
    for token in _rising(10):
        for kind, cache in zip(both.of, native, strict=True):
            feed_native(kind, cache, [[token]])
    assert trim_prompt_cache(native, 8) == 8, MENDED
    assert [cache.offset for cache in native] == [2, 5], MENDED
    with pytest.raises(HostState, match="cut after its front was dropped"):
        FixedCapacityChunkedCache.adopt(native[1], 40)

    cache = adopted(both, [_rising(10)], 1, 40)
    before = [raw(array) for array in cache.state]
    assert cache.trim(8) == 0
    assert [raw(array) for array in cache.state] == before
    assert feed(cache, both, [[99]]) == wanted(both, [[*_rising(10), 99]], 1)


def test_mlx_lm_1494_a_concatenating_cache_brings_back_what_was_cut() -> None:
    """https://github.com/ml-explore/mlx-lm/issues/1494"""
    native = ConcatenateKVCache()
    native.update_and_fetch(*marks([_rising(4)], WIDTHS))
    assert native.trim(2) == 2
    keys, _ = native.update_and_fetch(*marks([[99]], WIDTHS))
    assert keys[0, 0, :, 0].tolist() == [1, 2, 3, 4, 99], MENDED
    assert kind_of(native) is None  # so no session takes it
    with pytest.raises(HostState, match="only mlx-lm's KVCache"):
        FixedCapacityKVCache.adopt(native, 9)
