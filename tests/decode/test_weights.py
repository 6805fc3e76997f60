"""Parameters are inputs of the compiled step: replaced and changed weights both count, at no further trace."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten, tree_unflatten

from mlx_audit.adapters import adapter_for
from mlx_audit.decode import CompiledDecodeSession, DecodeStep
from tiny_models import FAMILIES, Eager, distance, tiny_model, tokens


def _replaced(model: Any, other: Any) -> None:
    model.update(other.parameters())


def _loaded(model: Any, other: Any) -> None:
    model.load_weights(tree_flatten(other.parameters()))


def _in_place(model: Any, other: Any) -> None:
    new = dict(tree_flatten(other.parameters()))
    for path, array in tree_flatten(model.parameters()):
        array[:] = new[path]


def _one_in_place(model: Any, other: Any) -> None:
    model.model.layers[2].self_attn.v_proj.weight *= 1.5


def _one_replaced(model: Any, other: Any) -> None:
    layer = model.model.layers[2].self_attn
    layer.v_proj = nn.Linear(32, 16, bias="bias" in layer.v_proj)


def _deleted_and_set_again(model: Any, other: Any) -> None:
    """A dict keeps what is set again at its end: keys and values, of one shape, change places."""
    for layer in model.model.layers:
        keys = layer.self_attn.k_proj
        del layer.self_attn.k_proj
        layer.self_attn.k_proj = keys


def _merged(model: Any, other: Any) -> None:
    """What fusing an adapter does: a new weight from the old one."""
    for layer in model.model.layers:
        layer.mlp.up_proj.update({"weight": layer.mlp.up_proj.weight + 0.3})


@pytest.mark.parametrize(
    "change",
    [_replaced, _loaded, _in_place, _one_in_place, _one_replaced, _deleted_and_set_again, _merged],
)
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_after_three_steps_are_those_of_the_new_weights(
    family: str, change: Callable[[Any, Any], None]
) -> None:
    model, ids = tiny_model(family), tokens(10)
    session, eager = CompiledDecodeSession(model, 12, evidence="ignore"), Eager(model)
    session.prefill([ids[:3]])
    eager.feed([ids[:3]])
    for token in ids[3:6]:
        session.step([token])
        eager.feed([[token]])
    without = session.copy().step([ids[6]])
    change(model, tiny_model(family, seed=1))
    assert distance(session.step([ids[6]]), wanted := eager.feed([[ids[6]]])) == 0.0
    if change is not _deleted_and_set_again:
        assert distance(without, wanted) > 1e-3
    for token in ids[7:]:
        assert distance(session.step([token]), eager.feed([[token]])) == 0.0
    assert session.trace_count == 1


def test_another_dtype_costs_one_trace_and_is_right() -> None:
    model, ids = tiny_model(), tokens(8)
    session, eager = CompiledDecodeSession(model, 12, evidence="ignore"), Eager(model)
    session.prefill([ids[:3]])
    eager.feed([ids[:3]])
    for token in ids[3:5]:
        session.step([token])
        eager.feed([[token]])
    model.lm_head.weight = model.lm_head.weight.astype(mx.bfloat16)
    for token in ids[5:]:
        assert distance(session.step([token]), eager.feed([[token]])) == 0.0
    assert session.trace_count == 2
    assert session.retrace_reasons == [
        reason for reason in session.retrace_reasons if "parameters[" in reason and "bfloat16" in reason
    ]


def test_quantizing_a_layer_later_costs_one_trace_and_is_right() -> None:
    model, ids = tiny_model(), tokens(8)
    session, eager = CompiledDecodeSession(model, 12, evidence="ignore"), Eager(model)
    session.prefill([ids[:3]])
    eager.feed([ids[:3]])
    session.step([ids[3]])
    eager.feed([[ids[3]]])
    nn.quantize(model, group_size=32, bits=8)
    for token in ids[4:]:
        assert distance(session.step([token]), eager.feed([[token]])) < 1e-4
    assert session.trace_count == 2


def test_the_step_is_pure_and_leaves_the_modules_own_arrays() -> None:
    model = tiny_model()
    step = DecodeStep(model, adapter_for(model, evidence="ignore").new_fixed_capacity_cache(6))
    own = [id(array) for array in step.parameters()]
    state = [cache.state for cache in step.caches]
    other = [array * 2 if array.ndim == 2 else array for array in step.parameters()]
    first, after = step(step.parameters(), state, mx.array([3]))
    changed, _ = step(other, state, mx.array([3]))
    again, _ = step(step.parameters(), state, mx.array([3]))
    assert distance(first, again) == 0.0
    assert distance(first, changed) > 1e-3
    assert [id(array) for array in step.parameters()] == own
    assert [arrays[2].item() for arrays in state] == [0] * 4
    assert [arrays[2].item() for arrays in after] == [1] * 4
    assert step.written == []
    slots = [slot.path for slot in step.slots()]
    assert slots == sorted(slots)
    assert (
        dict(tree_flatten(tree_unflatten(list(zip(slots, step.parameters(), strict=True))))).keys()
        == dict(tree_flatten(model.parameters())).keys()
    )
