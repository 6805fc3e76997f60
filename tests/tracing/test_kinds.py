"""The trace proof on every kind of cache: healthy families pass, and one planted fault a kind does not."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest

from mlx_audit.adapters import adapter_for
from mlx_audit.caches import cache_class
from mlx_audit.manifests import find_manifest
from mlx_audit.models.build import build_lazy, resolve_arguments
from mlx_audit.models.modules import import_model
from mlx_audit.tracing import StepTracer, lint, prove
from mlx_audit.tracing.attention import unmasked_attention
from mlx_audit.tracing.cost import step_cost

MASKS = {
    "gpt_oss": {"rotating over 8 keys", "linear over 2053 keys"},
    "qwen3_5": {"linear over 2053 keys"},
    "mamba2": set(),
    "falcon_h1": {"linear over 2053 keys"},
    "gemma3n": {"rotating over 8 keys", "linear over 2053 keys"},
    "deepseek_v32": {"linear over 20 keys", "linear over 2053 keys"},
    "baichuan_m1": {"rotating over 8 keys", "linear over 2053 keys"},
}
"""What masks each kind of cache of a family's first tiny configuration."""


def lazy_model(family: str) -> nn.Module:
    """Return the model of a family's first tiny configuration, its weights unevaluated."""
    manifest = find_manifest(family)
    assert manifest is not None
    module = import_model(manifest.module)
    return build_lazy(module, resolve_arguments(module, next(iter(manifest.variants.values())).tiny))


def findings(model: nn.Module) -> tuple[list[str], set[str]]:
    """Return all that the trace tier has against a model, and the names of its masks."""
    proof = prove(StepTracer(model, adapter_for(model, evidence="ignore")))
    unmasked, masks = unmasked_attention(proof.graph)
    graph = proof.graph
    found = [*lint.signature_drift(graph), *lint.baked_arrays(graph), *lint.broken_threads(graph)]
    return [*proof.differences, *found, *unmasked], set(masks)


@pytest.mark.parametrize("family", MASKS)
def test_nothing_is_found_in_a_healthy_family_and_every_attention_is_masked(family: str) -> None:
    found, masks = findings(lazy_model(family))
    assert found == []
    assert masks == MASKS[family]


def _frozen_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_class("rotating"), "_slot_of", lambda self, time: mx.zeros_like(time))


def _no_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    def visible(self: Any, queries: mx.array, times: mx.array, window: int | None) -> mx.array:
        return mx.ones((queries.shape[0], times.shape[0]), mx.bool_)

    monkeypatch.setattr(cache_class("rotating"), "_visible", visible)


def _host_window(monkeypatch: pytest.MonkeyPatch) -> None:
    """A ring that decides on the host whether it has turned: right at the position of the trace, and only there."""
    rotating: Any = cache_class("rotating")
    adopt = rotating.adopt.__func__

    def adopted(cls: Any, native: Any, max_tokens: int) -> Any:
        cache = adopt(cls, native, max_tokens)
        monkeypatch.setattr(cls, "turned", native.offset > native.max_size, raising=False)
        return cache

    def times(self: Any, N: int) -> mx.array:
        plain = mx.arange(self._rung)
        return plain + self._position if type(self).turned else plain

    monkeypatch.setattr(rotating, "adopt", classmethod(adopted))
    monkeypatch.setattr(rotating, "_key_times", times)


def _dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_class("arrays"), "__setitem__", lambda self, index, value: None)


def _reset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        cache_class("arrays"), "__getitem__", lambda self, index: mx.zeros_like(self.cache[index])
    )


def _wrong_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both parts of a composite write at the position of the first."""
    composite: Any = cache_class("composite")
    with_state = composite.with_state

    def shared(self: Any, state: Any, *, held: int | None = None) -> Any:
        cache = with_state(self, state, held=held)
        cache.caches[1]._position = cache.caches[0]._position
        return cache

    monkeypatch.setattr(composite, "with_state", shared)


FAULTS: list[tuple[str, Callable[[pytest.MonkeyPatch], None], str]] = [
    ("gpt_oss", _frozen_slot, "is written at a place that does not descend from caches[0]'s own position"),
    ("gpt_oss", _no_mask, "has no mask that descends from the position"),
    ("gpt_oss", _host_window, "prefill [11, 2]"),
    ("qwen3_5", _dropped, "caches[0].cache[0] is unchanged by a step"),
    ("mamba2", _reset, "is not read by a step, so nothing carries over"),
    ("deepseek_v32", _wrong_part, "caches[0][1]"),
]


@pytest.mark.parametrize(("family", "plant", "named"), FAULTS, ids=[plant.__name__ for _, plant, _ in FAULTS])
def test_a_planted_fault_is_named(
    family: str,
    plant: Callable[[pytest.MonkeyPatch], None],
    named: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plant(monkeypatch)
    found, _ = findings(lazy_model(family))
    assert any(named in text for text in found), found


class Rewriting(nn.Module):
    """A model around another one, whose forward replaces one of its own weights."""

    def __init__(self, inner: nn.Module, rewrite: Callable[[mx.array], mx.array]) -> None:
        super().__init__()
        self.inner = inner
        self.weight = mx.ones((3,))
        self._rewrite = rewrite

    def make_cache(self) -> Any:
        return self.inner.make_cache()  # type: ignore[operator]

    def __call__(self, inputs: mx.array, cache: Any = None) -> mx.array:
        self.weight = self._rewrite(self.weight)
        logits: mx.array = self.inner(inputs, cache=cache)
        return logits * mx.mean(self.weight)


@pytest.mark.parametrize(
    ("rewrite", "named"),
    [
        (lambda weight: mx.clip(weight.astype(mx.float32), -2.0, 2.0), None),
        (lambda weight: weight * 0.9, "wrote outside the caches: weight"),
        (lambda weight: mx.clip(weight * 0.9, -2.0, 2.0), "wrote outside the caches: weight"),
    ],
    ids=["bounded", "decays", "decays within bounds"],
)
def test_a_weight_may_be_held_within_bounds_and_nothing_else(
    rewrite: Callable[[mx.array], mx.array], named: str | None
) -> None:
    found, _ = findings(Rewriting(lazy_model("gpt_oss"), rewrite))
    assert bool(found) == (named is not None), found
    assert named is None or any(named in text for text in found), found


class UsedBefore(Rewriting):
    """As above, but the weight is used before it is held within bounds: the next token meets another one."""

    def __call__(self, inputs: mx.array, cache: Any = None) -> mx.array:
        logits: mx.array = self.inner(inputs, cache=cache)
        logits = logits * mx.mean(self.weight)
        if inputs.shape[1] == 1:
            self.weight = self._rewrite(self.weight)
        return logits


def test_a_weight_may_not_be_used_before_it_is_held_within_bounds() -> None:
    found, _ = findings(UsedBefore(lazy_model("gpt_oss"), lambda weight: mx.clip(weight, -2.0, 2.0)))
    assert any("wrote outside the caches: weight" in text for text in found), found


def test_of_experts_a_step_reads_those_that_a_token_goes_to() -> None:
    model = lazy_model("gpt_oss")  # 4 experts, of which a token goes to 2
    graph = prove(StepTracer(model, adapter_for(model, evidence="ignore"))).graph
    sizes = {value.path: math.prod(value.shape) * 4 for value in graph.parameters}
    experts = sum(size for path, size in sizes.items() if ".experts." in path and path.endswith("weight"))
    embedding = sizes["model.embed_tokens.weight"]
    read = step_cost(graph, 64).weights_bytes
    assert experts > 0
    # Biases of experts are looked up, which is not counted either.
    biases = sum(size for path, size in sizes.items() if ".experts." in path and path.endswith("bias"))
    assert read == sum(sizes.values()) - embedding - experts // 2 - biases
