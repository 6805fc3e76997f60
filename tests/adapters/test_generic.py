"""How a model comes by its fixed-capacity caches, and who is refused."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models.cache import KVCache, RotatingKVCache, make_prompt_cache

from mlx_audit.adapters import (
    FixedCapacityKVCacheProviding,
    GenericAdapter,
    ModuleState,
    adapter_for,
)
from mlx_audit.caches import FixedCapacityKVCache
from mlx_audit.decode import CompiledDecodeSession
from mlx_audit.errors import NotCompileCapable
from mlx_audit.manifests import CacheSpec
from tiny_models import FAMILIES, raw, shared_model, tiny_model


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("batch", [1, 3])
def test_generic_adapter_makes_one_cache_an_entry(family: str, batch: int) -> None:
    model = shared_model(family)
    adapter = GenericAdapter(model)
    assert isinstance(adapter, FixedCapacityKVCacheProviding)
    caches = adapter.new_fixed_capacity_cache(11, batch_size=batch)
    assert len(caches) == len(make_prompt_cache(model)) == 4
    for cache in caches:
        assert type(cache) is FixedCapacityKVCache
        assert [array.shape for array in cache.state] == [(batch, 2, 11, 8), (batch, 2, 11, 8), (1,)]
        assert (cache.capacity, cache.size(), cache.offset.item()) == (11, 0, 0)
        assert float(mx.abs(cache.keys).max()) == 0.0


def test_making_caches_changes_nothing_and_evaluates_nothing() -> None:
    model = tiny_model()
    state, weights = ModuleState(model), [raw(layer.self_attn.k_proj.weight) for layer in model.layers]
    mx.reset_peak_memory()
    base = mx.get_active_memory()
    # 64 Mi tokens would be gigabytes, were they allocated.
    caches = GenericAdapter(model).new_fixed_capacity_cache(1 << 26)
    assert caches[0].nbytes > 1 << 33
    assert mx.get_peak_memory() - base < 1 << 20
    assert state.changes() == []
    assert [raw(layer.self_attn.k_proj.weight) for layer in model.layers] == weights


def test_dtype_of_the_cache_is_that_of_the_models_keys() -> None:
    caches = GenericAdapter(tiny_model(dtype="bfloat16")).new_fixed_capacity_cache(5)
    assert {cache.keys.dtype for cache in caches} == {mx.bfloat16}


def test_model_that_brings_its_own_caches_is_taken() -> None:
    model: Any = tiny_model()
    asked: list[tuple[int, int]] = []

    class Own(type(model)):  # type: ignore[misc]
        def new_fixed_capacity_cache(self, max_tokens: int, *, batch_size: int = 1) -> list[Any]:
            asked.append((max_tokens, batch_size))
            return GenericAdapter(self).new_fixed_capacity_cache(max_tokens, batch_size=batch_size)

    model.__class__ = Own
    assert adapter_for(model) is model
    assert adapter_for(model, evidence="ignore") is model
    session = CompiledDecodeSession(model, 9, batch_size=2, evidence="ignore")
    assert asked == [(9, 2)]
    session.prefill([[1], [2]])
    assert session.step([3, 4]).shape == (2, 64)


def test_unknown_cache_class_is_refused_by_name() -> None:
    class Odd(KVCache):
        pass

    model: Any = tiny_model()
    type(model).make_cache, kept = (
        (lambda self: [KVCache(), Odd(), KVCache(), KVCache()]),
        type(model).make_cache,
    )
    try:
        with pytest.raises(NotCompileCapable, match=r"cache 1: .*Odd"):
            adapter_for(model, evidence="ignore")
        with pytest.raises(NotCompileCapable):
            CompiledDecodeSession(model, 8, evidence="ignore")
    finally:
        type(model).make_cache = kept
    assert adapter_for(model, evidence="ignore").specs == [CacheSpec("linear")] * 4


def test_another_number_of_caches_than_declared_is_refused() -> None:
    with pytest.raises(NotCompileCapable, match="4 caches; allowed: 3 as declared"):
        GenericAdapter(shared_model(), [CacheSpec("linear")] * 3).new_fixed_capacity_cache(8)


def test_a_kind_that_nothing_knows_is_refused() -> None:
    with pytest.raises(NotCompileCapable, match=r"cache 0: .* no fixed-capacity form yet; found: nonsense"):
        GenericAdapter(shared_model(), [CacheSpec("nonsense")] * 4)


def test_a_declared_kind_must_be_that_of_the_live_cache() -> None:
    """A manifest that calls a ring linear would have every token after the wrap read the wrong slots."""
    model: Any = tiny_model()
    type(model).make_cache, kept = (
        (lambda self: [RotatingKVCache(max_size=4) for _ in range(4)]),
        type(model).make_cache,
    )
    try:
        with pytest.raises(
            NotCompileCapable, match=r"layer 0: .*found: rotating\(window=4, keep=0\); allowed: linear"
        ):
            GenericAdapter(model, [CacheSpec("linear")] * 4).new_fixed_capacity_cache(8)
    finally:
        type(model).make_cache = kept


def test_topology_comes_from_the_manifest_where_evidence_is_required() -> None:
    adapter = adapter_for(shared_model("qwen2"))
    assert isinstance(adapter, GenericAdapter)
    assert adapter.specs == [CacheSpec("linear")] * 4


def test_a_model_that_no_manifest_declares_is_refused() -> None:
    class Undeclared(nn.Module):
        pass

    with pytest.raises(NotCompileCapable, match="no manifest declares this model"):
        adapter_for(Undeclared())
