"""The lint of a traced step, on graphs of a few nodes: what other backends and other families hand out."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from mlx_audit.tracing import Graph, Leaf, Node, Value, lint
from mlx_audit.tracing.attention import unmasked_attention
from mlx_audit.tracing.constants import Constant

C = 4099
KEYS, VALUES, POSITION, TOKENS, WEIGHT = (
    Value("k", (1, 2, C, 8), "float32", "caches[0].keys"),
    Value("v", (1, 2, C, 8), "float32", "caches[0].values"),
    Value("p", (1,), "int32", "caches[0].position"),
    Value("t", (1,), "int32", "tokens"),
    Value("w", (64, 16), "float32", "model.head.weight"),
)
QUERIES, NEW, NEXT, MASK = (
    Value("q", (1, 2, 1, 8), "float32"),
    Value("n", (1, 2, 1, 8), "float32"),
    Value("p1", (1,), "int32"),
    Value("m", (1, 1, 1, C), "bool"),
)
KEYS1, VALUES1 = Value("k1", KEYS.shape, "float32"), Value("v1", VALUES.shape, "float32")
SCORES, OUT, LOGITS = (
    Value("s", (1, 2, 1, C), "float32"),
    Value("o", (1, 2, 1, 8), "float32"),
    Value("l", (1, 64), "float32"),
)
HEAD = [
    Node("Gather", (), (WEIGHT, TOKENS), (QUERIES,)),
    Node("Gather", (), (WEIGHT, TOKENS), (NEW,)),
    Node("DynamicSliceUpdate", (), (KEYS, NEW, POSITION), (KEYS1,)),
    Node("DynamicSliceUpdate", (), (VALUES, NEW, POSITION), (VALUES1,)),
    Node("Add", (), (POSITION, Value("one", (), "int32")), (NEXT,)),
    Node("GreaterEqual", (), (POSITION, Value("slots", (C,), "int32")), (MASK,)),
]
TAIL = [Node("Matmul", (), (OUT, WEIGHT), (LOGITS,))]


def _graph(
    nodes: Sequence[Node], constants: dict[str, Constant] | None = None, rung: int | None = None
) -> Graph:
    return Graph(
        inputs=[WEIGHT, KEYS, VALUES, POSITION, TOKENS],
        outputs=[LOGITS, KEYS1, VALUES1, NEXT],
        constants=constants or {},
        nodes=list(nodes),
        parameter_count=1,
        leaves=[
            Leaf(KEYS.path, "buffer", "linear", C, rung or C, C),
            Leaf(VALUES.path, "buffer", "linear", C, rung or C, C),
            Leaf(POSITION.path, "position", "linear", C, rung or C, C),
        ],
    )


def _softmax(mask: Sequence[Node], scores: Value = SCORES) -> Graph:
    """Return a graph of attention as the CPU decomposes it; `mask` leads from scores `s` to masked scores `z`."""
    last = mask[-1].outputs[0] if mask else scores
    return _graph(
        [
            *HEAD,
            Node("Matmul", (), (QUERIES, KEYS1), (SCORES,)),
            *mask,
            Node("Softmax", (), (last,), (Value("a", last.shape, "float32"),)),
            Node("Matmul", (), (Value("a", last.shape, "float32"), VALUES1), (OUT,)),
            *TAIL,
        ]
    )


def _fused(*masks: Value) -> Graph:
    scale = Value("scale", (), "float32")
    return _graph(
        [*HEAD, Node("ScaledDotProductAttention", (), (QUERIES, KEYS1, VALUES1, *masks), (OUT,)), *TAIL]
        if masks
        else [
            *HEAD,
            Node("ScaledDotProductAttention", (str(scale),), (QUERIES, KEYS1, VALUES1), (OUT,)),
            *TAIL,
        ]
    )


def _unmasked(graph: Graph) -> tuple[list[str], int]:
    findings, masks = unmasked_attention(graph)
    return findings, sum(mask.attentions for mask in masks.values())


def _baked(graph: Graph) -> list[str]:
    return lint.baked_arrays(graph)


MASKED = Value("z", SCORES.shape, "float32")
SELECT = Node("Select", (), (MASK, SCORES, Value("low", (), "float32")), (MASKED,))


def test_a_selected_mask_is_a_mask() -> None:
    assert _unmasked(_softmax([SELECT])) == ([], 1)


def test_a_fused_attention_with_an_array_mask_is_masked() -> None:
    assert _unmasked(_fused(MASK)) == ([], 1)


def test_a_fused_attention_without_one_is_not() -> None:
    findings, count = _unmasked(_fused())
    assert count == 1
    assert "has no mask that descends from the position" in findings[0]


def test_a_mask_that_descends_from_no_position_is_none() -> None:
    loose = Value("constant_mask", MASK.shape, "bool")
    assert _unmasked(_fused(loose))[0]
    assert _unmasked(_softmax([Node("Select", (), (loose, SCORES), (MASKED,))]))[0]


def test_a_float_mask_may_be_added_but_a_cast_boolean_may_not() -> None:
    added = Value("f", MASK.shape, "float32")
    add = Node("Add", (), (SCORES, added), (MASKED,))
    low = Value("low", (), "float32")
    chosen = _softmax([Node("Select", (), (MASK, low, low), (added,)), add])
    assert _unmasked(chosen) == ([], 1)
    cast = _softmax([Node("AsType", (), (MASK,), (added,)), add])
    assert _unmasked(cast)[0]


def test_sinks_make_the_axis_one_longer() -> None:
    wider = Value("wide", (1, 2, 1, C + 1), "float32")
    sink = Node("Concatenate", (), (Value("sink", (1, 2, 1, 1), "float32"), MASKED), (wider,))
    assert _unmasked(_softmax([SELECT, sink])) == ([], 1)
    bare = Node("Concatenate", (), (Value("sink", (1, 2, 1, 1), "float32"), SCORES), (wider,))
    assert _unmasked(_softmax([bare]))[0]


def test_the_softmax_of_a_router_is_no_attention() -> None:
    graph = _softmax([SELECT])
    gates = Value("gates", (1, 1, 8), "float32")
    graph.nodes.append(Node("Softmax", (), (gates,), (Value("routed", (1, 1, 8), "float32"),)))
    assert _unmasked(graph) == ([], 1)


def test_keys_may_be_rotated_between_cache_and_attention() -> None:
    turned = Value("turned", KEYS.shape, "float32")
    graph = _softmax([SELECT])
    index = next(i for i, node in enumerate(graph.nodes) if node.inputs == (QUERIES, KEYS1))
    cos = Value("cos", (C, 8), "float32")
    graph.nodes[index : index + 1] = [
        Node("Multiply", (), (KEYS1, cos), (Value("half", KEYS.shape, "float32"),)),
        Node("Subtract", (), (Value("half", KEYS.shape, "float32"), cos), (turned,)),
        Node("Matmul", (), (QUERIES, turned), (SCORES,)),
    ]
    assert _unmasked(graph) == ([], 1)


def test_a_cache_that_nobody_reads_is_named() -> None:
    graph = _graph([*HEAD, Node("Multiply", (), (QUERIES, QUERIES), (OUT,)), *TAIL])
    findings, count = _unmasked(graph)
    assert count == 0
    assert findings == ["caches[0] is written, but no attention reads it over its whole rung"]


def test_a_healthy_state_threads() -> None:
    graph = _fused(MASK)
    assert lint.broken_threads(graph) == []
    assert lint.signature_drift(graph) == []
    assert _baked(graph) == []
    assert [value.path for value in graph.positions()] == ["caches[0].position"]


@pytest.mark.parametrize("primitive", ["Scatter", "ScatterAxis"])
def test_other_indexed_writes_count_too(primitive: str) -> None:
    graph = _fused(MASK)
    graph.nodes[2] = Node(primitive, (), (KEYS, POSITION, NEW), (KEYS1,))
    assert lint.broken_threads(graph) == []
    graph.nodes[2] = Node(primitive, (), (KEYS, TOKENS, NEW), (KEYS1,))
    assert lint.broken_threads(_graph(graph.nodes)) == [
        "caches[0].keys is written at a place that does not descend from caches[0]'s own position"
    ]


def test_a_write_into_another_buffer_is_named() -> None:
    nodes = [*_fused(MASK).nodes]
    nodes[2] = Node("DynamicSliceUpdate", (), (VALUES, NEW, POSITION), (KEYS1,))
    assert "caches[0].keys comes out without descending from what went in" in lint.broken_threads(
        _graph(nodes)
    )


@pytest.mark.parametrize(
    ("form", "found"),
    [((64, 16), True), ((16, 64), True), ((64, 17), False), ((64,), False), ((), False)],
)
def test_a_captured_matrix_is_found_by_its_form(form: tuple[int, ...], found: bool) -> None:
    nodes = [*_fused(MASK).nodes[:-1], Node("Matmul", (), (OUT, Value("c", form, "float32")), (LOGITS,))]
    assert bool(_baked(_graph(nodes, {"c": Constant(form, "float32", b"")}))) == found


def test_a_constant_of_the_form_of_a_cache_is_found() -> None:
    graph = _fused(MASK)
    graph.constants["c"] = Constant((1, 2, C, 8), "float32", b"")
    assert "has the form of a cache array" in _baked(graph)[0]
    graph.constants["c"] = Constant((C,), "int32", b"")
    assert _baked(graph) == []


def test_the_prefix_of_a_rung_is_the_one_slice_that_is_allowed() -> None:
    rung = 2053
    mask, scores, masked = (
        Value("m", (1, 1, 1, rung), "bool"),
        Value("s", (1, 2, 1, rung), "float32"),
        Value("z", (1, 2, 1, rung), "float32"),
    )
    keys, values = Value("kr", (1, 2, rung, 8), "float32"), Value("vr", (1, 2, rung, 8), "float32")

    def graph(start: int) -> Graph:
        bounds = ((0, 0, start, 0), (1, 2, start + rung, 8), (1, 1, 1, 1))
        return _graph(
            [
                *HEAD[:-1],
                Node("GreaterEqual", (), (POSITION, Value("slots", (rung,), "int32")), (mask,)),
                Node("Slice", bounds, (KEYS1,), (keys,)),
                Node("Slice", bounds, (VALUES1,), (values,)),
                Node("Matmul", (), (QUERIES, keys), (scores,)),
                Node("Select", (), (mask, scores), (masked,)),
                Node("Softmax", (), (masked,), (Value("a", masked.shape, "float32"),)),
                Node("Matmul", (), (Value("a", masked.shape, "float32"), values), (OUT,)),
                *TAIL,
            ],
            rung=rung,
        )

    assert _unmasked(graph(0)) == ([], 1)
    findings, _ = _unmasked(graph(7))
    assert len([text for text in findings if "by a constant slice" in text]) == 2
