"""StepTracer: traces any size without evaluating, names what fails, and puts MLX back as it was."""

from __future__ import annotations

import gc
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlx_audit.adapters import ModuleState, adapter_for, parameter_slots
from mlx_audit.decode import CompiledDecodeSession
from mlx_audit.models.build import build_lazy, resolve_arguments
from mlx_audit.tracing import ExportRefused, StepTracer, TraceFailed, compile_is_on, prove
from tiny_models import Eager, distance, module_of, raw, tiny_model, tokens
from tracing.conftest import proof_of

LLAMA_405B = {
    "model_type": "llama",
    "hidden_size": 16384,
    "num_hidden_layers": 126,
    "intermediate_size": 53248,
    "num_attention_heads": 128,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": False,
}


def tracer_of(model: Any, **options: Any) -> StepTracer:
    return StepTracer(model, adapter_for(model, evidence="ignore"), **options)


def test_405_billion_parameters_trace_without_being_evaluated() -> None:
    module = module_of("llama")
    # Six of its layers carry the claim; the full depth is traced by the audit itself.
    config = {**LLAMA_405B, "num_hidden_layers": 6}
    gc.collect()
    mx.reset_peak_memory()
    base = mx.get_active_memory()
    model = build_lazy(module, resolve_arguments(module, config), dtype="bfloat16")
    proof = proof_of(model)
    assert (proof.differences, proof.traces) == ([], 12)
    assert (
        sum(value.size for _, container, key in parameter_slots(model) for value in [container[key]]) > 20e9
    )
    assert mx.get_peak_memory() - base < 4 << 20
    assert len([node for node in proof.graph.nodes if node.primitive == "DynamicSliceUpdate"]) == 12


def test_a_proof_leaves_the_model_usable_and_as_it_was() -> None:
    model, ids = tiny_model(), tokens(8)
    state, weights = ModuleState(model), [raw(c[key]) for _, c, key in parameter_slots(model)]
    assert prove(tracer_of(model)).differences == []
    assert state.changes() == []
    assert [raw(c[key]) for _, c, key in parameter_slots(model)] == weights
    session, eager = CompiledDecodeSession(model, 10, evidence="ignore"), Eager(model)
    assert distance(session.prefill([ids]), eager.feed([ids])) == 0.0
    assert distance(session.step([1]), eager.feed([[1]])) == 0.0


def test_the_graph_names_its_inputs_and_outputs() -> None:
    model = tiny_model()
    graph = prove(tracer_of(model, capacity=101, batch_size=2)).graph
    assert [value.path for value in graph.parameters] == [slot.path for slot in parameter_slots(model)]
    assert [leaf.path for leaf in graph.leaves] == [
        f"caches[{i}].{name}" for i in range(4) for name in ("keys", "values", "position")
    ]
    assert [value.path for value in graph.state_inputs] == [leaf.path for leaf in graph.leaves]
    assert [value.shape for value in graph.state_outputs] == [value.shape for value in graph.state_inputs]
    assert [value.shape for value in graph.outputs[:1]] == [(2, 64)]
    assert graph.inputs[-1].path == "tokens"
    assert graph.state_inputs[0].shape == (2, 2, 101, 8)


RAISES = [("        h = x + r\n", "        h = x + r + int(cache.offset)\n")]


def _settings() -> tuple[tuple[Any, ...], bool, bool]:
    return (mx.contiguous, mx.to_fp8, mx.from_fp8), gc.isenabled(), compile_is_on()


@pytest.mark.parametrize("collecting", [True, False])
@pytest.mark.parametrize("compiling", [True, False])
@pytest.mark.parametrize("outcome", ["success", "raises", "refused"])
def test_contiguous_collection_and_compilation_are_put_back(
    outcome: str,
    compiling: bool,
    collecting: bool,
    mutant: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = mutant(RAISES) if outcome == "raises" else tiny_model()
    tracer = tracer_of(model)
    try:
        (gc.enable if collecting else gc.disable)()
        (mx.enable_compile if compiling else mx.disable_compile)()
        before = _settings()
        assert before[1:] == (collecting, compiling)
        if outcome == "success":
            assert prove(tracer).differences == []
        elif outcome == "raises":
            with pytest.raises(TraceFailed):
                prove(tracer)
        else:

            def refuse(*_: Any, **__: Any) -> None:
                raise ValueError("[Primitive::export] Nonsense cannot be exported")

            with monkeypatch.context() as patch:
                patch.setattr(mx, "export_function", refuse)
                with pytest.raises(ExportRefused, match="Nonsense"):
                    tracer.events(tracer.state_after([3]), lambda event: None)
        assert _settings() == before
    finally:
        gc.enable()
        mx.enable_compile()


def test_a_failure_names_the_line_and_leaves_no_placeholder(mutant: Callable[..., Any]) -> None:
    model = mutant(RAISES)
    source = Path(inspect.getfile(type(model))).read_text(encoding="utf-8")
    line = source[: source.index("int(cache.offset)")].count("\n") + 1
    state = ModuleState(model)
    with pytest.raises(TraceFailed, match="ValueError") as caught:
        prove(tracer_of(model))
    assert str(caught.value.where).endswith(f".py:{line}")
    assert state.changes() == []
    mx.eval(model.parameters())


def test_random_numbers_still_come_after_a_proof(mutant: Callable[..., Any]) -> None:
    model = mutant([("        h = x + r\n", "        h = x + r + mx.random.normal(x.shape)\n")])
    assert proof_of(model).differences
    assert mx.random.normal((3,)).tolist() != mx.random.normal((3,)).tolist()


def test_contiguous_in_a_forward_does_not_stop_the_proof(mutant: Callable[..., Any]) -> None:
    model = mutant([("        h = x + r\n", "        h = mx.contiguous(x + r)\n")])
    assert proof_of(model).differences == []


def test_fp8_in_a_forward_does_not_stop_the_proof(mutant: Callable[..., Any]) -> None:
    rounded = "        h = mx.from_fp8(mx.to_fp8(x + r), mx.float32)\n"
    model = mutant([("        h = x + r\n", rounded)])
    assert proof_of(model).differences == []
    assert mx.from_fp8(mx.to_fp8(mx.array([1.3])), mx.float32).item() == 1.25


def test_a_nested_compiled_function_does_not_stop_the_proof(mutant: Callable[..., Any]) -> None:
    model = mutant([("        h = x + r\n", "        h = mx.compile(lambda y: mx.exp(y) * 2)(x + r)\n")])
    assert proof_of(model).differences == []
