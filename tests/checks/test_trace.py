"""TRC001-005, each alone: what a model's source, or a cache, can do to the graph of a step."""

from __future__ import annotations

from pathlib import Path

import pytest

from audited import green, healthy, line_of, mutated, new_subject, only, red
from mlx_audit.faults import FAULTS
from mutations import MUTATIONS
from tiny_models import FAMILIES

CODES = ("TRC001", "TRC002", "TRC003", "TRC004", "TRC005")


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("code", CODES)
def test_healthy(code: str, family: str) -> None:
    green(code, healthy(family))


@pytest.mark.parametrize(
    "mutation",
    [
        "renamed",
        "attention_written_out",
        "attention_with_additive_mask",
        "rotated_after_the_update",
        "attention_in_float32",
    ],
)
def test_other_ways_to_write_the_same_model_are_right(mutation: str, tmp_path: Path) -> None:
    subject = new_subject(module=mutated(tmp_path, *MUTATIONS[mutation]))
    for code in CODES:
        green(code, subject)
    assert green("TRC005", subject).figures["attentions"] == 4


SAME_GRAPH = {
    "rope_offset_by_int": "eval an array during function transformations",
    "rope_offset_by_item": "eval an array during function transformations",
    "branch_on_offset": "eval an array during function transformations",
    "keys_cut_by_offset": "Slice indices must be integers",
    "counter_on_module": "constant",
    "toggle_each_call": "constant",
    "mask_memoized": "model.kept.1",
    "window_start_captured_at_prefill": "constant",
    "running_average": "model.average",
    "random_numbers": "trace after prefill",
    "weight_kept_at_first_call": "kept outside the caches",
    "norm_weight_copied_at_first_call": "kept outside the caches",
    "cache_of_another_layer": "took in another number of tokens than were fed",
}
"""What the reason of TRC001 says, by mutation."""

LINES = {
    "rope_offset_by_int": "int(cache.offset)",
    "rope_offset_by_item": "getattr(cache.offset",
    "branch_on_offset": "cache[0].offset > 7",
    "keys_cut_by_offset": ": cache.offset, :]",
}
"""The line that TRC001 names, where an exception tells it."""


@pytest.mark.parametrize("mutation", SAME_GRAPH)
def test_same_graph_is_red(mutation: str, tmp_path: Path) -> None:
    module = mutated(tmp_path, *MUTATIONS[mutation])
    result = red("TRC001", new_subject(module=module))
    assert SAME_GRAPH[mutation] in result.reason
    if mutation in LINES:
        assert result.where == f"{Path(module.__file__ or '').name}:{line_of(module, LINES[mutation])}"


def test_a_frozen_constant_is_named_with_its_consumer(tmp_path: Path) -> None:
    module = mutated(tmp_path, *MUTATIONS["window_start_captured_at_prefill"])
    reason = red("TRC001", new_subject(module=module)).reason
    assert "constant bfloat16[] 0.2" in reason
    assert "became bfloat16[] 0.0" in reason
    assert "used by cache write (DynamicSliceUpdate)" in reason


CACHES = {
    "state_comes_out_wider": (
        "TRC002",
        "caches[0].keys goes in as bfloat16[1, 2, 4099, 8] and comes out as float32",
    ),
    "fetched_zeros": ("TRC003", "Matmul reads a cache array bfloat16"),
    "buffer_made_anew": ("TRC003", "DynamicSliceUpdate reads a cache array"),
    "frozen_write": (
        "TRC004",
        "caches[0].keys is written at a place that does not descend from caches[0]'s own position",
    ),
    "write_by_select": ("TRC004", "caches[0].keys is not written in place: it comes out of Select"),
    "values_never_written": ("TRC004", "caches[0].values is unchanged by a step"),
    "position_stands_still": ("TRC004", "caches[0].position is unchanged by a step"),
    "caches_in_another_order": ("TRC004", "caches[0].keys"),
    "parameters_captured": ("TRC003", "kept outside the caches"),
}
"""Which trace check sees a fault of a cache or of the step, and what it says."""


@pytest.mark.parametrize("fault", CACHES)
def test_a_fault_of_a_cache_is_red(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    FAULTS[fault](monkeypatch)
    code, reason = CACHES[fault]
    assert reason in red(code, new_subject()).reason


@pytest.mark.parametrize("mutation", ["weight_in_closure", "weight_transposed_in_closure"])
def test_a_captured_weight_is_red_whatever_its_dtype(mutation: str, tmp_path: Path) -> None:
    subject = new_subject(module=mutated(tmp_path, *MUTATIONS[mutation]))
    assert (
        "weight model.layers.0.mlp.up_proj.weight is not an input of the graph"
        in red("TRC003", subject).reason
    )


def test_a_captured_copy_of_a_weight_that_is_read_elsewhere_is_red(tmp_path: Path) -> None:
    subject = new_subject(module=mutated(tmp_path, *MUTATIONS["tied_weight_in_closure"]))
    assert "which has the form of model." in red("TRC003", subject).reason


MASKS = ["mask_added_as_bool", "mask_multiplied", "mask_left_out"]


@pytest.mark.parametrize("mutation", MASKS)
def test_an_attention_without_a_mask_is_red(mutation: str, tmp_path: Path) -> None:
    subject = new_subject(module=mutated(tmp_path, *MUTATIONS[mutation]))
    result = red("TRC005", subject)
    assert "attention 0 (Softmax over" in result.reason
    assert "has no mask that descends from the position" in result.reason
    masks = result.figures.pop("masks")
    assert sum(int(text.split(" × ")[0]) for text in masks.values()) == 4
    assert any(name.endswith("unmasked") for name in masks)
    assert result.figures == {"attentions": 4, "capacity": 4099, "rung": 2053}


def test_one_unmasked_attention_of_four_is_named(tmp_path: Path) -> None:
    subject = new_subject(module=mutated(tmp_path, *MUTATIONS["mask_left_out_in_one_layer"]))
    result = red("TRC005", subject)
    assert result.reason.startswith("attention 1 (Softmax over")
    assert "attention 2" not in result.reason


def test_a_cut_of_the_buffer_is_red(tmp_path: Path) -> None:
    subject = new_subject(module=mutated(tmp_path, *MUTATIONS["keys_cut_to_twenty"]))
    assert "caches[0] is cut to [1, 2, 20, 8] by a constant slice" in red("TRC005", subject).reason


def test_an_export_that_mlx_refuses_is_undecided(monkeypatch: pytest.MonkeyPatch) -> None:
    import mlx.core as mx

    def refuse(*arguments: object, **options: object) -> None:
        raise ValueError("[Primitive] Unable to get name of Fence")

    monkeypatch.setattr(mx, "export_function", refuse)
    result = only("TRC001", new_subject())
    assert result.status == "not-run"
    assert "Fence" in result.reason


_ROTATE = "            queries = self.rope(queries, offset=cache.offset)\n"
_IMPORT = "from .cache import KVCache, RotatingKVCache\n"
HIDDEN = {
    "a weak dictionary": (
        "import weakref\n_KEPT = weakref.WeakKeyDictionary()\n",
        "_KEPT[cache] = mx.mean(x)",
    ),
    "a UserDict": ("from collections import UserDict\n_KEPT = UserDict()\n", "_KEPT['last'] = mx.mean(x)"),
    "a thread-local": ("import threading\n_KEPT = threading.local()\n", "_KEPT.last = mx.mean(x)"),
}


@pytest.mark.parametrize("place", HIDDEN)
def test_what_is_kept_out_of_sight_is_found(place: str, tmp_path: Path) -> None:
    made, kept = HIDDEN[place]
    module = mutated(tmp_path, (_IMPORT, _IMPORT + made), (_ROTATE, f"            {kept}\n{_ROTATE}"))
    assert "wrote outside the caches: globals of" in red("TRC001", new_subject(module=module)).reason
