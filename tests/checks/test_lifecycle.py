"""LIF001-003, each alone: failures, new weights, long runs."""

from __future__ import annotations

import pytest

from audited import green, healthy, new_subject, red
from mlx_audit.manifests import find_manifest
from planted import FAULTS
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


def test_states_of_odd_sizes_are_no_growth() -> None:
    """MLX may hold them in spare buffers of other sizes, from one step to the next."""
    manifest = find_manifest("nemotron_h")
    assert manifest is not None
    for variant in manifest.variants.values():
        layers = {"num_hidden_layers": len(str(variant.tiny["hybrid_override_pattern"]))}
        green("LIF003", new_subject("nemotron_h", config={**variant.tiny, **layers}, expected=None))


def test_weights_that_only_change_in_place_count(monkeypatch: pytest.MonkeyPatch) -> None:
    FAULTS["parameters_replaced_only"](monkeypatch)
    assert "after weights were changed in place" in red("LIF002", new_subject()).reason
