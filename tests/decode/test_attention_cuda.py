"""The attention kernel for CUDA: when it takes over, what the proof asks of it, and, on CUDA, what it computes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import pytest

from mlx_audit.adapters import adapter_for
from mlx_audit.decode import CompiledDecodeSession, attention_cuda
from mlx_audit.tracing import StepTracer, lint, prove
from mlx_audit.tracing.attention import unmasked_attention
from mlx_audit.tracing.graph import Graph, Leaf, Node, Value
from tiny_models import tiny_model

PROMPT = [5, 3, 9, 1, 7]


def reference(
    queries: mx.array, keys: mx.array, values: mx.array, position: mx.array, scale: float, *, rung: int
) -> tuple[mx.array, mx.array]:
    """The kernel's result by ordinary operations."""
    mask = mx.arange(keys.shape[2]) <= mx.reshape(position, (-1, 1, 1, 1))
    repeats = queries.shape[1] // keys.shape[1]
    scores = (queries * scale) @ mx.swapaxes(mx.repeat(keys, repeats, 1), -1, -2)
    weights = mx.softmax(mx.where(mask, scores.astype(mx.float32), -mx.inf), -1)
    out = weights @ mx.repeat(values, repeats, 1).astype(mx.float32)
    return out.astype(queries.dtype), position + 1


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Let the reference stand in for the kernel; returns the rungs of its calls, one a layer and trace."""
    rungs: list[int] = []

    def attend(*arguments: Any, rung: int) -> tuple[mx.array, mx.array]:
        rungs.append(rung)
        return reference(*arguments, rung=rung)

    monkeypatch.setattr(attention_cuda, "available", lambda: True)
    monkeypatch.setattr(attention_cuda, "attend", attend)
    return rungs


def decoded(session: CompiledDecodeSession) -> list[mx.array]:
    logits = [session.prefill([PROMPT] * session.batch_size)]
    logits += [session.step([token] * session.batch_size) for token in (2, 8)]
    logits.append(session.extend([[4, 6, 1]] * session.batch_size))
    return [*logits, session.step([3] * session.batch_size)]


def test_it_is_off_where_mlx_does_not_compute_on_cuda() -> None:
    if mx.default_device() == mx.cpu:
        assert not attention_cuda.available()


@pytest.mark.parametrize("batch", [1, 3])
def test_single_tokens_go_through_it_and_give_the_same(batch: int, stand_in: list[int]) -> None:
    model = tiny_model()
    got = decoded(CompiledDecodeSession(model, 300, batch, evidence="ignore"))
    layers = len(model.layers)
    assert stand_in == [256] * layers  # one trace; neither prefill nor extension
    attention_cuda.available = lambda: False  # type: ignore[assignment]  # the fixture puts it back
    wanted = decoded(CompiledDecodeSession(model, 300, batch, evidence="ignore"))
    assert stand_in == [256] * layers
    for ours, plain in zip(got, wanted, strict=True):
        assert mx.abs(ours - plain).max().item() < 1e-4


def test_mlxs_function_is_back_after_a_failure(stand_in: list[int]) -> None:
    model = tiny_model()
    session = CompiledDecodeSession(model, 16, evidence="ignore")
    session.prefill([PROMPT])
    native, layer = mx.fast.scaled_dot_product_attention, model.layers[1]

    class Broken(type(layer)):  # type: ignore[misc]
        def __call__(self, *arguments: Any, **options: Any) -> Any:
            raise ValueError("planted")

    model.layers[1].__class__ = Broken
    with pytest.raises(ValueError, match="planted"):
        session.step([1])
    assert mx.fast.scaled_dot_product_attention is native


@pytest.mark.parametrize(
    "changed",
    [
        lambda a: {**a, "mask": None},
        lambda a: {**a, "mask": a["mask"] & True},
        lambda a: {**a, "keys": a["keys"] * 1},
        lambda a: {**a, "sinks": mx.zeros(a["queries"].shape[1])},
        lambda a: {**a, "queries": mx.concatenate([a["queries"]] * 2, 2), "mask": None},
    ],
    ids=["no mask", "other mask", "other keys", "sinks", "two queries"],
)
def test_anything_else_takes_mlxs_own_function(changed: Callable[..., Any], stand_in: list[int]) -> None:
    model = tiny_model()
    session = CompiledDecodeSession(model, 16, evidence="ignore")
    session.prefill([PROMPT])
    (cache, *_) = session.caches
    with attention_cuda.position_bounded_attention([cache]):
        mask = cache.make_mask(1)
        new = mx.ones((1, cache.keys.shape[1], 1, cache.keys.shape[3]))
        keys, values = cache.update_and_fetch(new, new)
        queries = mx.ones((1, 2 * keys.shape[1], 1, keys.shape[3]))
        given = {"queries": queries, "keys": keys, "values": values, "mask": mask, "sinks": None}
        call = changed(given)
        arrays = [call.pop(name) for name in ("queries", "keys", "values")]
        mx.eval(mx.fast.scaled_dot_product_attention(*arrays, scale=1.0, **call))
        assert stand_in == []
        arrays = [given.pop(name) for name in ("queries", "keys", "values")]
        mx.eval(mx.fast.scaled_dot_product_attention(*arrays, scale=1.0, **given))
        assert stand_in == [16]


@pytest.mark.parametrize("rung", [2500, 256])
def test_the_trace_proof_sees_one_form_at_every_rung(rung: int, stand_in: list[int]) -> None:
    model = tiny_model()
    assert prove(StepTracer(model, adapter_for(model, evidence="ignore"))).differences == []
    assert set(stand_in) == {0}
    stand_in.clear()
    session = CompiledDecodeSession(model, rung, evidence="ignore")
    session.prefill([PROMPT * (rung // 5 - 1)])
    session.step([1])
    assert stand_in == [rung] * len(model.layers)


def kernel_graph(*, position: str = "p0", name: str = attention_cuda.NAME) -> Graph:
    """A step of two caches whose first one the kernel reads, given the position `position`."""
    buffer = (1, 2, 29, 8)
    inputs = [Value("w", (8, 8), "float32", "weight")]
    for index in (0, 1):
        inputs += [
            Value(f"{leaf}{index}", buffer, "float32", f"caches[{index}].{leaf}")
            for leaf in ("keys", "values")
        ]
        inputs.append(Value(f"p{index}", (1,), "int32", f"caches[{index}].position"))
    inputs.append(Value("t", (1,), "int32", "tokens"))
    known = {value.name: value for value in inputs}
    new = Value("new", (1, 2, 1, 8), "float32")
    nodes = [Node("Matmul", (), (known["w"],), (new,))]
    outputs: list[Value] = []
    for index in (0, 1):
        for leaf in ("keys", "values"):
            written = Value(f"{leaf}{index}'", buffer, "float32")
            inward = (known[f"{leaf}{index}"], known[f"p{index}"], new)
            nodes.append(Node("ScatterAxis", (), inward, (written,)))
            outputs.append(written)
            known[written.name] = written
        following = Value(f"p{index}'", (1,), "int32")
        known["derived"] = Value("derived", (1,), "int32")
        if index == 0:
            nodes.append(Node("Add", (), (known["p0"],), (known["derived"],)))
        reads = (new, known[f"keys{index}'"], known[f"values{index}'"])
        given = known[position] if index == 0 else known["p1"]
        out = Value(f"out{index}", (1, 4, 1, 8), "float32")
        nodes.append(
            Node("CustomKernel", (f"custom_kernel_{name}_whole",), (*reads, given), (following, out))
        )
        outputs.append(following)
    leaves = [
        Leaf(value.path, "buffer" if value.shape == buffer else "position", "linear", 29, 29, 29)
        for value in inputs[1:-1]
    ]
    return Graph(inputs, [Value("logits", (1, 8), "float32"), *outputs], {}, nodes, 1, leaves)


def test_the_proof_takes_the_kernel_for_an_attention_that_stops_at_the_position() -> None:
    graph = kernel_graph()
    findings, masks = unmasked_attention(graph)
    assert findings == []
    assert {name: (mask.attentions, mask.mask) for name, mask in masks.items()} == {
        "linear over 29 keys": (2, "stops at the position")
    }
    assert lint.broken_threads(graph) == []


@pytest.mark.parametrize("position", ["p1", "derived"])
def test_the_kernel_must_get_the_position_of_its_own_cache(position: str) -> None:
    findings, _ = unmasked_attention(kernel_graph(position=position))
    assert findings
    assert "no mask that descends from the position" in findings[0]


def test_another_kernel_is_no_attention() -> None:
    findings, _ = unmasked_attention(kernel_graph(name="somebody_elses"))
    assert "no attention reads it" in findings[0]


@pytest.mark.skipif(not attention_cuda.available(), reason="runs on CUDA")
@pytest.mark.parametrize(("dtype", "bound"), [(mx.float32, 1e-5), (mx.float16, 2e-3), (mx.bfloat16, 2e-2)])
@pytest.mark.parametrize("width", [8, 64, 80, 128])
@pytest.mark.parametrize(
    ("capacity", "at", "rung"), [(29, 0, 29), (29, 28, 29), (700, 256, 512), (8192, 5000, 5120)]
)
def test_on_cuda_it_computes_attention_and_reads_nothing_beyond_the_position(
    dtype: mx.Dtype, bound: float, width: int, capacity: int, at: int, rung: int
) -> None:
    mx.random.seed(0)
    for heads, key_heads, batch in ((4, 2, 1), (9, 3, 1), (4, 4, 3)):
        queries = mx.random.normal((batch, heads, 1, width)).astype(dtype)
        keys, values = mx.random.normal((2, batch, key_heads, capacity, width)).astype(dtype)
        position = mx.array([at], mx.int32)
        got, following = attention_cuda.attend(queries, keys, values, position, width**-0.5, rung=rung)
        floats = [array.astype(mx.float32) for array in (queries, keys, values)]
        wanted, _ = reference(*floats, position, width**-0.5, rung=rung)
        assert mx.abs(got.astype(mx.float32) - wanted).max().item() < bound
        assert following.tolist() == [at + 1]
        beyond = mx.reshape(mx.arange(capacity) > at, (1, 1, -1, 1))
        poisoned = [mx.where(beyond, mx.array(mx.nan, dtype), array) for array in (keys, values)]
        again, _ = attention_cuda.attend(queries, *poisoned, position, width**-0.5, rung=rung)
        assert mx.array_equal(got, again)
