"""The trace proof: what the graph of a decode step says about every position at once."""

from __future__ import annotations

from collections.abc import Sequence

from mlx_audit.checks.base import Check, CheckFailed, Figures
from mlx_audit.checks.subject import Subject
from mlx_audit.tracing import HISTORIES, lint
from mlx_audit.tracing.attention import unmasked_attention
from mlx_audit.tracing.cost import step_cost

COST_CAPACITY = 8192
"""Tokens at which the cost of a step is stated."""

_MOST_NAMED = 4


class SameGraph(Check):
    """The step is the same graph at every position and after every history.

    What it does:
        Prefills lazily in chunks of [3], [1] and [5, 4] tokens, hands the caches over, and traces the step twice in a
        row after each. All six graphs must agree in primitives, arguments, wiring and the value of every constant,
        and no forward may leave an array on the module. Nothing is evaluated, so it works at any model size.

    Why:
        A position that the forward reads on the host is frozen into the graph. The compiled model goes on, fluent and
        wrong, and nothing raises.

    Example:
        constant int32[] 3 became int32[] 1, used by RoPE (Cos)

    How to fix:
        Take the position from the cache as an array (`cache.offset`) and keep it one: no int(), .item(), range, slice
        or branch on it, and no state on the module.

    Sources:
        ml-explore/mlx-swift-lm#406 (frozen position); mlx docs, export_function with a callback
    """

    code = "TRC001"
    tier = "trace"
    requires = ("TOP001", "TOP003")

    def run(self, subject: Subject) -> Figures:
        proof = subject.proof
        figures = {
            "traces": proof.traces,
            "histories": [list(chunks) for chunks in HISTORIES],
            "primitives": len(proof.graph.nodes),
            "constants": len(proof.graph.constants),
        }
        _require_none(proof.differences, figures)
        return figures


class OneTrace(Check):
    """There is exactly one trace for each rung, batch size and dtype.

    What it does:
        Compares shape and dtype of each state leaf that goes into the traced step with what comes out. States the
        cost of the step.

    Why:
        MLX keys a trace by the shapes and dtypes of its inputs and never evicts one. A state that drifts, from
        bfloat16 to float32 say, costs a trace at the next token, and another kind of state may grow for ever.

    Example:
        caches[0].keys goes in as bfloat16[1, 2, 4099, 8] and comes out as float32[1, 2, 4099, 8]

    How to fix:
        Cast to the cache's dtype before writing.

    Sources:
        mlx/compile.cpp (cache key); ml-explore/mlx#3964 (one entry for each value, never freed)
    """

    code = "TRC002"
    tier = "trace"
    requires = ("TRC001",)

    def run(self, subject: Subject) -> Figures:
        graph = subject.proof.graph
        cost = step_cost(graph, COST_CAPACITY)
        _require_none(lint.signature_drift(graph), {})
        return {"state_leaves": len(graph.state_inputs), "cost": cost.figures()}


class NothingBakedIn(Check):
    """No cache array and no weight is baked into the graph as a constant.

    What it does:
        Looks for constants, and for values that descend from no input, that have the form of a cache array; and for
        weights that the step does not read although something of their form takes their place.

    Why:
        A cache captured by a closure keeps the content that it had when the step was traced. A captured weight
        survives every later update of the model.

    Example:
        weight model.layers.0.mlp.up_proj.weight is not an input of the graph; a constant takes its place

    How to fix:
        Pass caches and weights through the step's arguments; don't keep copies of them in closures.

    Sources:
        ml-explore/mlx-swift-lm#586 (a trace keeps the weights that it captured)
    """

    code = "TRC003"
    tier = "trace"
    requires = ("TRC001", "TRC002")

    def run(self, subject: Subject) -> Figures:
        graph = subject.proof.graph
        _require_none(lint.baked_arrays(graph), {})
        unread = [value.path for value in graph.parameters if value.name not in graph.users]
        return {"weights": len(graph.parameters), "unread_weights": len(unread)}


class StateThreads(Check):
    """All state threads through the step: each leaf comes out changed, from itself, written at its own position.

    What it does:
        Follows each state leaf from input to output. A buffer must come out of indexed writes into itself, at a place
        that descends from its own cache's position; a position must advance.

    Why:
        A leaf that comes out as it went in is forgotten; one that is written at a constant place keeps only the last
        token.

    Example:
        caches[2].keys is written at a place that does not descend from caches[2]'s own position

    How to fix:
        Let `update_and_fetch` write with `mx.slice_update` at the position array, then rebind the position.

    Sources:
        mlx docs/src/usage/kv_cache.rst
    """

    code = "TRC004"
    tier = "trace"
    requires = ("TRC001", "TRC003")

    def run(self, subject: Subject) -> Figures:
        graph, capacity = subject.proof.graph, subject.tracer.capacity
        parts = [
            (f"caches[{index}]", part)
            for index, cache in enumerate(subject.tracer.step.caches)
            for part in cache.parts
        ]
        short = [
            f"{name} holds {part.capacity} tokens, asked for were {capacity}"
            for name, part in parts
            if part.capacity != capacity
        ]
        short += [
            f"{name} says that it holds {capacity} tokens, and has {array.shape[2]} slots"
            for name, part in parts
            if part.kind in ("linear", "quantized")
            for array, role in zip(part.state, part.roles, strict=True)
            if role == "buffer" and array.shape[2] != capacity
        ]
        _require_none(short + lint.broken_threads(graph), {})
        return {"state_leaves": len(graph.state_inputs)}


class EveryAttentionMasked(Check):
    """Every attention is masked over its keys by the position.

    What it does:
        Finds each softmax (or fused attention) that reads a cache, traced at a prime capacity so that no other axis is
        taken for it, and asks that its scores pass a mask over all keys that descends from a position. The one
        constant slice of a buffer that is allowed is the rung, its prefix.

    Why:
        A fixed-capacity buffer has slots that hold no token yet, or one that was forgotten. In eager decoding with
        mlx-lm's caches a single token needs no mask, so a model may never have applied one; a boolean mask that is
        added instead of applied hides nothing.

    Example:
        attention 0 (Softmax over [1, 2, 2, 1, 2053]) has no mask that descends from the position

    How to fix:
        Give the mask from `cache.make_mask` to `scaled_dot_product_attention`, or use `mx.where(mask, scores, -inf)`.

    Sources:
        mlx_lm/models/base.py create_attention_mask; mlx_lm/models/olmo.py (boolean mask added)
    """

    code = "TRC005"
    tier = "trace"
    requires = ("TRC001", "TRC004")

    def not_applicable(self, subject: Subject) -> str | None:
        parts = [part for cache in subject.tracer.step.caches for part in cache.parts]
        return None if any(part.slots or part.kind != "arrays" for part in parts) else "no attention"

    def run(self, subject: Subject) -> Figures:
        tracer = subject.tracer
        findings, masks = unmasked_attention(subject.proof.graph)
        figures = {
            "attentions": sum(mask.attentions for mask in masks.values()),
            "capacity": tracer.capacity,
            "rung": tracer.rung,
            "masks": {name: f"{mask.attentions} × {mask.mask}" for name, mask in masks.items()},
        }
        _require_none(findings, figures)
        return figures


def _require_none(findings: Sequence[str], figures: Figures) -> None:
    if findings:
        more = f" … and {len(findings) - _MOST_NAMED} more" if len(findings) > _MOST_NAMED else ""
        raise CheckFailed("; ".join(findings[:_MOST_NAMED]) + more, figures=figures)
