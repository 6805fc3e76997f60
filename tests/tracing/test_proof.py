"""The trace proof: nothing against the original, something against every defect."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from audited import green, new_subject
from mlx_audit.adapters import adapter_for
from mlx_audit.tracing import StepTracer, prove
from tiny_models import FAMILIES, config_of, shared_model
from tracing.conftest import findings, proof_of
from tracing.mutants import LONG_WINDOW, MUTANTS


@pytest.mark.parametrize("family", FAMILIES)
def test_mlx_lms_own_models_trace_alike_at_every_position_and_history(family: str) -> None:
    proof = proof_of(shared_model(family))
    assert (proof.differences, proof.traces) == ([], 12)


def test_a_renamed_copy_is_clean(mutant: Callable[..., Any]) -> None:
    assert (
        findings(
            mutant([("class LlamaModel", "class RenamedModel"), ("LlamaModel(args)", "RenamedModel(args)")])
        )
        == []
    )


def test_a_window_start_shows_after_a_history_that_fills_the_window(mutant: Callable[..., Any]) -> None:
    tracer_model = mutant(LONG_WINDOW)
    tracer = StepTracer(tracer_model, adapter_for(tracer_model, evidence="ignore"))
    found = " ".join(prove(tracer).differences)
    assert "mask" in found
    assert "wrote outside the caches: model.start" in found


@pytest.mark.parametrize("name", MUTANTS)
def test_a_defect_is_caught_by_the_proof_alone(name: str, mutant: Callable[..., Any]) -> None:
    replacements, word = MUTANTS[name]
    found = findings(mutant(replacements))
    assert found
    assert word in " ".join(found)


def test_a_threshold_on_thousands_of_keys_shows(mutant: Callable[..., Any]) -> None:
    written = "            keys, values = cache.update_and_fetch(keys, values)\n"
    threshold = "            if keys.shape[2] > 6000:\n                queries = queries * 2\n"
    assert any("rung" in text for text in findings(mutant([(written, written + threshold)])))


@pytest.mark.parametrize("vocabulary", [60, 84, 132, 200, 2054, 4100])
def test_a_vocabulary_of_one_more_than_a_traced_size_is_no_change_of_form(vocabulary: int) -> None:
    """With sinks, attention has one key more than the rung; a weight of that size is something else."""
    config = config_of("llama", vocab_size=vocabulary, num_hidden_layers=1)
    green("TRC001", new_subject(config=config))
