"""LIF001-003, each alone: failures, new weights, long runs."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import pytest

from audited import green, healthy, mutated, new_subject, red
from mlx_audit.checks.memory import no_spare_buffers
from mlx_audit.faults import FAULTS
from tiny_models import FAMILIES

CODES = ("LIF001", "LIF002", "LIF003")


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("code", CODES)
def test_healthy(code: str, family: str) -> None:
    green(code, healthy(family))


RED = {
    ("LIF001", "failed_step_advances"): "after a failed trace: position 14, 0 traces",
    ("LIF001", "failed_step_leaves_tracers_on_the_module"): "the module holds a placeholder of a trace",
    ("LIF001", "failed_step_leaves_tracers_in_the_state"): "kept outside the caches",
    ("LIF001", "position_in_place"): "a failed extend changed the state",
    ("LIF001", "position_as_python_int"): "wanted 1",
    ("LIF002", "parameters_gathered_once"): "logits differ at step 1 after weights were replaced",
    ("LIF002", "parameters_captured"): "kept outside the caches",
    ("LIF003", "old_states_kept"): "active memory grew by",
    ("LIF003", "sessions_kept"): "active memory grew by",
    ("LIF003", "position_as_python_int"): "60 traces, wanted 0 and 1",
}


@pytest.mark.parametrize(("code", "fault"), RED)
def test_red(code: str, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    FAULTS[fault](monkeypatch)
    assert RED[code, fault] in red(code, new_subject()).reason


def test_spare_buffers_that_are_too_large_are_no_growth() -> None:
    """MLX may put an array into a spare buffer that is larger, and counts all of it: states would seem to grow."""

    def counted() -> int:
        large = mx.zeros((1000,)) + 1
        mx.eval(large)
        del large
        before = mx.get_active_memory()
        small = mx.zeros((900,)) + 1
        mx.eval(small)
        return mx.get_active_memory() - before

    mx.clear_cache()
    assert counted() > 4 * 900, "MLX no longer does so: the check needs no care"
    with no_spare_buffers():
        assert counted() == 4 * 900
    assert counted() > 4 * 900, "spare buffers are kept again"


def test_weights_that_only_change_in_place_count(monkeypatch: pytest.MonkeyPatch) -> None:
    FAULTS["parameters_replaced_only"](monkeypatch)
    assert "after weights were changed in place" in red("LIF002", new_subject()).reason


def test_a_model_that_calls_only_parts_of_its_layers_is_healthy(tmp_path: Path) -> None:
    past = ("h = layer(h, mask, cache=cache)", "h = TransformerBlock.__call__(layer, h, mask, cache=cache)")
    green("LIF001", new_subject(module=mutated(tmp_path, past)))


def test_a_model_that_swallows_what_a_layer_raises_is_red(tmp_path: Path) -> None:
    call = "            h = layer(h, mask, cache=cache)"
    deaf = call.replace("            h", "            try:\n                h")
    deaf += "\n            except Exception:\n                pass"
    reason = red("LIF001", new_subject(module=mutated(tmp_path, (call, deaf)))).reason
    assert "took in another number of tokens" in reason
