"""A model that is changed while its cache is in use is another model: nothing stored before is met."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_map
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.tuner.utils import linear_to_lora_layers

from mlx_audit.models.build import build_tiny, resolve_arguments
from mlx_audit.prefix import PrefixCache, PrefixRefused, Reason
from prefix.caching import BUDGET, assert_equal
from prefix_models import _CONFIGURATIONS, subject
from tiny_models import module_of, tiny_model

PROMPT = [(7 * index * index + index) % 60 for index in range(30)]


def replaced(model: nn.Module) -> None:
    model.update(tree_map(lambda array: array * 1.5, model.parameters()))


def one_value(model: nn.Module) -> None:
    embedding = model.model.embed_tokens
    embedding.weight = embedding.weight.at[PROMPT[3], 5].add(1)


def cast(model: nn.Module) -> None:
    model.set_dtype(mx.float16)


def quantized(model: nn.Module) -> None:
    nn.quantize(model, group_size=32, bits=4)


def adapter(model: nn.Module) -> None:
    linear_to_lora_layers(model, 2, {"rank": 4, "scale": 10.0, "dropout": 0.0})
    model.update(tree_map(lambda array: array + 0.1, model.trainable_parameters()))


def setting(model: nn.Module) -> None:
    model.model.layers[0].self_attn.scale *= 2


@pytest.mark.parametrize("change", [replaced, one_value, cast, quantized, adapter, setting])
def test_nothing_is_met_after_a_change(change: Callable[[nn.Module], None]) -> None:
    model = tiny_model()
    cache = PrefixCache(model, BUDGET, chunk=8)
    assert cache.prefill(PROMPT).plan.prefix == 0
    assert cache.prefill(PROMPT).plan.prefix == len(PROMPT) - 1
    change(model)
    assert cache.plan(PROMPT).reason is Reason.MISS
    found = cache.prefill(PROMPT)
    cold = PrefixCache(model, BUDGET, chunk=8).prefill(PROMPT)
    assert found.plan.reason is Reason.MISS
    assert_equal(found, cold, len(PROMPT))
    again = cache.prefill(PROMPT)  # the changed model has entries of its own
    assert again.plan.prefix == len(PROMPT) - 1
    assert_equal(again, cold, len(PROMPT))


def test_weights_that_are_put_back_are_met_again_and_equal_ones_are_the_same() -> None:
    model = tiny_model()
    cache = PrefixCache(model, BUDGET, chunk=8)
    old = model.parameters()
    cache.prefill(PROMPT)
    world = cache.fingerprint()
    model.update(tree_map(lambda array: array * 1, old))  # new arrays of the same content
    assert cache.plan(PROMPT).prefix == len(PROMPT) - 1
    assert cache.fingerprint().digest == world.digest
    replaced(model)
    assert cache.plan(PROMPT).prefix == 0
    model.update(old)
    assert cache.plan(PROMPT).prefix == len(PROMPT) - 1


def test_replaced_weights_are_freed() -> None:
    model = tiny_model()
    cache = PrefixCache(model, BUDGET, chunk=8)
    cache.prefill(PROMPT)
    old = weakref.ref(model.model.embed_tokens.weight)
    assert old() is not None
    replaced(model)
    gc.collect()
    assert old() is None


def test_a_store_does_not_load_after_a_change(tmp_path: Path) -> None:
    model = tiny_model()
    cache = PrefixCache(model, BUDGET, chunk=8)
    cache.prefill(PROMPT)
    cache.save(tmp_path)
    one_value(model)
    with pytest.raises(PrefixRefused, match="another weights") as caught:
        cache.load(tmp_path)
    assert caught.value.reason is Reason.OTHER_FINGERPRINT
    assert cache.plan(PROMPT).prefix == 0


def in_place(model: nn.Module) -> None:
    model.model.embed_tokens.weight[PROMPT[3]] = 1


def test_a_change_in_place_is_noticed_by_save_and_after_clear(tmp_path: Path) -> None:
    model = tiny_model()
    cache = PrefixCache(model, BUDGET, chunk=8)
    cache.prefill(PROMPT)
    world = cache.fingerprint()
    in_place(model)
    cache.save(tmp_path)  # what the old weights have made is not called the new ones'
    assert cache.fingerprint().weights != world.weights
    assert PrefixCache(model, BUDGET).load(tmp_path) == 0
    model.model.embed_tokens.weight[PROMPT[3]] = 2
    cache.clear()
    found = cache.prefill(PROMPT)
    assert_equal(found, PrefixCache(model, BUDGET, chunk=8).prefill(PROMPT), len(PROMPT))
    assert cache.fingerprint().digest == PrefixCache(model, BUDGET).fingerprint().digest


@pytest.mark.parametrize("other", [{"num_key_value_heads": 4}, {"hidden_size": 64}, {"dtype": "float16"}])
def test_a_stack_of_other_heads_widths_or_dtype_is_refused(other: dict[str, object]) -> None:
    cache = PrefixCache(tiny_model(), BUDGET, chunk=8)
    foreign = tiny_model(**other)
    caches = make_prompt_cache(foreign)
    mx.eval(foreign(mx.array([PROMPT]), cache=caches))
    with pytest.raises(PrefixRefused, match="form of arrays") as caught:
        cache.insert(PROMPT, caches)
    assert caught.value.reason is Reason.OTHER_FINGERPRINT
    assert len(cache) == 0


def test_a_recurrence_of_another_size_is_refused() -> None:
    module = module_of("mamba2")
    config = {"model_type": "mamba2", **_CONFIGURATIONS["mamba2"], "state_size": 8}
    foreign = build_tiny(module, resolve_arguments(module, config), seed=0)
    cache = PrefixCache(subject("mamba2"), BUDGET, chunk=8)
    tokens = (PROMPT * 2)[:40]
    caches = make_prompt_cache(foreign)
    mx.eval(foreign(mx.array([tokens]), cache=caches), [one.state for one in caches])
    with pytest.raises(PrefixRefused, match="form of arrays"):
        cache.insert(tokens, caches, position=len(tokens))
