"""State that a compiled graph would drop or freeze without a word is refused, with the path of the leaf."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models.cache import ArraysCache, KVCache, QuantizedKVCache, RotatingKVCache, make_prompt_cache

from mlx_audit.adapters import GenericAdapter
from mlx_audit.decode import DecodeStep, check_state_tree, require_fixed_capacity
from mlx_audit.errors import HostState
from tiny_models import shared_model


class Holder:
    """An object that holds an array; MLX does not look inside."""

    def __init__(self) -> None:
        self.keys = mx.zeros(1)


@pytest.mark.parametrize(
    "state",
    [
        [mx.zeros(1), mx.zeros(2)],
        [(mx.zeros(1), mx.zeros(2)), (mx.zeros(1), mx.zeros(2))],
        {"a": mx.zeros(1), "b": [{"c": (mx.zeros(1),)}]},
        [],
    ],
    ids=["list of arrays", "list of tuples", "nested dicts", "empty"],
)
def test_states_that_a_graph_carries(state: Any) -> None:
    check_state_tree(state)


@pytest.mark.parametrize(
    ("state", "where"),
    [
        ((mx.zeros(1), mx.zeros(2)), "state"),
        (mx.zeros(1), "state"),
        (Holder(), "state"),
        (None, "state"),
        ([mx.zeros(1), Holder()], "state[1]"),
        ([Holder()], "state[0]"),
        ([[mx.zeros(1)], [mx.zeros(1), 3]], "state[1][1]"),
        ([mx.zeros(1), None], "state[1]"),
        ({"keys": mx.zeros(1), "offset": 4}, "state['offset']"),
        ([{"a": (mx.zeros(1), "text")}], "state[0]['a'][1]"),
        ([{1, 2}], "state[0]"),
        ([nn.Linear(1, 1)], "state[0]"),
    ],
    ids=[
        "bare tuple",
        "bare array",
        "bare object",
        "nothing",
        "list with an object",
        "list of objects",
        "Python int",
        "None",
        "int in a dict",
        "text",
        "set",
        "module",
    ],
)
def test_states_that_a_graph_would_freeze(state: Any, where: str) -> None:
    with pytest.raises(HostState) as caught:
        check_state_tree(state)
    assert caught.value.where == where
    assert caught.value.allowed


def test_mlx_does_drop_what_is_refused_here() -> None:
    """The reason for the refusal: an object's array is frozen at its first value, and nothing is raised."""
    holder = Holder()

    def add(x: mx.array) -> mx.array:
        holder.keys = holder.keys + x
        return holder.keys

    compiled = mx.compile(add, inputs=[holder], outputs=[holder])
    assert [compiled(mx.array([1.0])).item() for _ in range(3)] == [1.0, 1.0, 1.0]


@pytest.mark.parametrize(
    "make",
    [KVCache, lambda: RotatingKVCache(max_size=8), QuantizedKVCache],
    ids=["plain", "rotating", "quantized"],
)
def test_stock_caches_are_refused_by_name(make: Any) -> None:
    cache = make()
    with pytest.raises(HostState, match="position is host state") as caught:
        require_fixed_capacity([cache])
    assert f"{type(cache).__name__}.offset" in str(caught.value)
    assert "caches[0]" in str(caught.value)


def test_the_prefilled_caches_of_a_model_are_refused() -> None:
    model = shared_model()
    caches = make_prompt_cache(model)
    model(mx.array([[1, 2, 3]]), cache=caches)
    with pytest.raises(HostState, match=r"KVCache\.offset is int 3"):
        DecodeStep(model, caches)
    mixed = [*GenericAdapter(model).new_fixed_capacity_cache(4)[:2], *caches[2:]]
    with pytest.raises(HostState, match=r"caches\[2\]"):
        DecodeStep(model, mixed)


def test_other_objects_are_refused_too() -> None:
    for wrong in (None, ArraysCache(2), mx.zeros(1), object()):
        with pytest.raises(HostState):
            require_fixed_capacity([wrong])


def test_fixed_capacity_caches_pass() -> None:
    require_fixed_capacity(GenericAdapter(shared_model()).new_fixed_capacity_cache(4))


def test_a_stock_cache_compiled_naively_is_wrong_from_the_second_step_on() -> None:
    """What the refusal saves from: the first replay is right, the later ones write into the same slot."""
    from tiny_models import Eager, distance, tokens

    model, ids = shared_model(), tokens(10)
    caches, eager = make_prompt_cache(model), Eager(model)
    model(mx.array([ids[:5]]), cache=caches)
    mx.eval([cache.state[:2] for cache in caches])
    eager.feed([ids[:5]])
    arrays = [[cache.keys, cache.values] for cache in caches]

    def naive(token: mx.array) -> mx.array:
        for cache, own in zip(caches, arrays, strict=True):
            cache.keys, cache.values = own
        logits = model(token, cache=caches)[:, -1]
        for cache, own in zip(caches, arrays, strict=True):
            own[:] = cache.keys, cache.values
        return logits

    compiled = mx.compile(naive, inputs=arrays, outputs=arrays)
    errors = [distance(compiled(mx.array([[token]])), eager.feed([[token]])) for token in ids[5:]]
    assert errors[0] == 0.0
    assert min(errors[1:]) > 0.1
    assert [cache.offset for cache in caches] == [6] * 4
