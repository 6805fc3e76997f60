"""Every model file of mlx-lm: nothing crashes, what stands in the way is found at its line, and nothing else is."""

from __future__ import annotations

import time

import pytest

from mlx_audit.source import Consumer
from source_table import DOCUMENT, with_table, zoo

pytestmark = pytest.mark.xdist_group("zoo")

INCOMPATIBLE = {
    "afm7": {("SRC002", "queries = self.q_norm(self.rope(queries, offset=S - L))")},
    "minimax_m3_vl": {("SRC002", "qpos = mx.arange(S - L, S)")},
    "olmo": {("SRC003", "scores += mask")},
    "phi3small": {
        ("SRC002", "q_pos = mx.arange(kv_blocks - q_blocks, kv_blocks)[None, :, None]"),
        ("SRC003", "scores = scores + mask"),
    },
    "dbrx": {("SRC005", "for xt, st, it in zip(x, scores, inds.tolist()):")},
    "gpt_bigcode": {("SRC001", "position_ids = mx.array(np.arange(cache[0].offset, cache[0].offset + L))")},
    "llama4": {
        ("SRC001", "linds = mx.arange(start, end)"),
        ("SRC001", "rinds = mx.arange(offset, end)[:, None]"),
        ("SRC001", "mx.floor(mx.arange(offset + 1, offset + L + 1) / self.floor_scale)"),
    },
}
"""The families that fail under fixed caches, with the lines at fault; deepseek_v41 has a test of its own."""

DYNAMIC = "mlx_lm.models.rope_utils.DynamicNTKScalingRoPE"


def _line(consumer: Consumer) -> str:
    return consumer.file.read_text(encoding="utf-8").splitlines()[consumer.line - 1].strip()


def test_all_files_are_read_to_their_end_in_twenty_seconds() -> None:
    started = time.process_time()
    reports = zoo()
    assert time.process_time() - started < 20
    assert len(reports) > 100
    assert not [report.unreadable for report in reports.values() if report.unreadable]


@pytest.mark.parametrize("family", INCOMPATIBLE)
def test_an_incompatible_family_is_flagged_at_its_lines_only(family: str) -> None:
    hazards = [hazard for hazard in zoo()[family].hazards if DYNAMIC not in hazard.needs]
    assert {(hazard.code, _line(hazard)) for hazard in hazards} == INCOMPATIBLE[family]


def test_what_only_some_layers_reach_names_their_class() -> None:
    (hazard,) = [hazard for hazard in zoo()["llama4"].hazards if hazard.when and DYNAMIC not in hazard.needs]
    assert hazard.when == "self.attn_temperature_tuning and (not self.use_rope)"
    assert hazard.needs == ("mlx_lm.models.llama4.Attention",)


def test_the_own_cache_of_deepseek_v41() -> None:
    report = zoo()["deepseek_v41"]
    assert {hazard.code for hazard in report.hazards} == {"SRC006"}
    always = {_line(hazard) for hazard in report.hazards if not hazard.when}
    assert {
        "class LayerCache:",
        "self.offset = 0",
        "self.offset += kv.shape[1]",
        "return mx.concatenate([cached, new], axis=1)",
    } <= always


def test_no_other_family_has_an_unconditional_hazard() -> None:
    others = zoo().keys() - INCOMPATIBLE.keys() - {"deepseek_v41"}
    assert not [hazard for family in others for hazard in zoo()[family].hazards if not hazard.when]


def test_the_only_conditional_hazard_of_the_others_is_dynamic_rope() -> None:
    others = zoo().keys() - INCOMPATIBLE.keys() - {"deepseek_v41"}
    hazards = {(family, hazard) for family in others for hazard in zoo()[family].hazards}
    assert {hazard.needs for _, hazard in hazards} == {(DYNAMIC,)}
    assert all("rope_type == 'dynamic'" in hazard.when for _, hazard in hazards)
    assert {_line(hazard) for _, hazard in hazards} == {
        "seq_len = max(x.shape[-2] + offset, self.max_position_embeddings)"
    }
    assert {"llama", "qwen2", "gemma3_text"} <= {family for family, _ in hazards}


def test_dead_code_is_not_reported() -> None:
    file = zoo()["internlm3"].file
    assert not [hazard for hazard in zoo()["internlm3"].hazards if hazard.file == file]


def test_families_with_a_position_have_safe_consumers() -> None:
    kinds = {family: {consumer.kind for consumer in report.safe} for family, report in zoo().items()}
    without = {family for family, found in kinds.items() if "update" not in found}
    assert without == {"deepseek_v41"}


def test_the_table_of_hazards_is_up_to_date() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    assert with_table(text) == text, "run `python tests/source_table.py`"
