"""PAR001-004, each alone, and no false alarm on random healthy models."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from audited import green, healthy, mutated, new_subject, only, red
from kind_models import new_kind_subject
from mlx_audit.checks.base import all_checks
from mlx_audit.checks.subject import Subject
from mlx_audit.faults import FAULTS
from mlx_audit.models.rope import with_rope
from mutations import MUTATIONS
from tiny_models import FAMILIES, config_of

CODES = ("PAR001", "PAR002", "PAR003", "PAR004")


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("code", CODES)
def test_healthy(code: str, family: str) -> None:
    green(code, healthy(family))


def test_the_main_configuration_is_compared_in_three_dtypes_and_with_float64() -> None:
    figures = green("PAR001", new_subject(profile="ci")).figures
    assert set(figures) == {"float32", "bfloat16", "float16", "float64"}
    assert set(green("PAR001", healthy()).figures) == set(figures) - {"float16"}, "a quick audit saves one"
    assert set(green("PAR001", new_subject(main=False)).figures) == {"float32"}


def sliding(*layers: str, window: int = 8) -> Subject:
    """Return a llama with these layers, each `sliding` or `full`."""
    kinds = [f"{layer}_attention" for layer in layers]
    config = config_of("llama", layer_types=kinds, num_hidden_layers=len(layers), sliding_window=window)
    return new_subject("llama", config=config, exactness="reordered")


def test_each_window_is_turned() -> None:
    figures = green("PAR001", sliding("sliding", "full")).figures["float32"]
    assert figures["windows"] == [8]
    # Prompts of 13, 1 and 28, then 7, 8 and 9 with 17 steps each, and 17 with 25; and the prompts themselves.
    assert figures["compared"] == 17 + 7 + 2 + 3 * 18 + 26
    assert 0 < figures["minimum_tolerance"] < 1e-4


def test_the_figures_give_the_difference_of_each_step() -> None:
    figures = green("PAR001", sliding("sliding", "full")).figures
    shown = figures["float32"]
    assert len(shown["differences"]) == 25, "the longest run takes 25 steps"
    assert shown["steps_a_difference"] == 1
    assert 0 < max(shown["differences"]) < shown["allowed"] == 1e-4
    assert max(shown["differences"]) == float(f"{shown['minimum_tolerance']:.3g}")
    assert "differences" not in figures["bfloat16"]
    exact = green("PAR001", healthy()).figures["float32"]
    assert (set(exact["differences"]), exact["allowed"]) == ({0.0}, 0.0)


def test_many_steps_share_a_number() -> None:
    wide = green("PAR001", sliding("sliding", "full", window=32)).figures["float32"]
    assert (len(wide["differences"]), wide["steps_a_difference"]) == (49, 2), "97 steps, in twos"
    assert max(wide["differences"]) == float(f"{wide['minimum_tolerance']:.3g}"), "none is left out"


def test_the_step_that_differs_is_among_the_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    FAULTS["ring_turns_one_early"](monkeypatch)
    result = red("PAR001", sliding("sliding", "full"))
    assert result.where is not None
    assert result.where.startswith("step 1 after a prompt of 13")
    assert len(result.figures["differences"]) == 1
    assert result.figures["differences"][0] > result.figures["allowed"]


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("ring_forgets_one_at_its_first_turn", "logits differ at step 2 after a prompt of 7, float32"),
        ("ring_turns_one_early", "logits differ at step 1 after a prompt of 13, float32"),
        ("traced_again_at_the_turn", "traced 2 times in 17 steps, wanted 1"),
    ],
)
def test_a_ring_that_turns_wrongly_is_red(fault: str, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    FAULTS[fault](monkeypatch)
    assert red("PAR001", sliding("sliding", "full")).reason.startswith(reason)


def test_a_window_too_wide_to_be_turned_is_undecided() -> None:
    result = only("PAR001", sliding("sliding", "full", window=129))
    assert result.status == "not-run"
    assert "a window of 129 tokens is too wide" in result.reason


@pytest.mark.parametrize("kind", ["linear", "rotating", "composite_of_slots"])
def test_a_dtype_that_drifts_is_red_in_that_dtype(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    subject = new_subject() if kind == "linear" else new_kind_subject(kind)
    FAULTS["cache_read_in_float32"](monkeypatch)
    result = red("PAR001", subject)
    assert result.where == "step 1 after a prompt of 13, bfloat16"
    assert "dtype float32, wanted bfloat16" in result.reason


_OFFSET = "            queries = self.rope(queries, offset=cache.offset)\n"


@pytest.mark.parametrize("compiled_only", [False, True])
def test_what_raises_in_a_dtype_is_left_out_only_where_eager_decoding_raises_too(
    compiled_only: bool, tmp_path: Path
) -> None:
    also = " and isinstance(cache.offset, mx.array)" if compiled_only else ""
    refusal = f"            if x.dtype == mx.float16{also}:\n                raise ValueError('no float16')\n"
    subject = new_subject(module=mutated(tmp_path, (_OFFSET, refusal + _OFFSET)), profile="ci")
    if compiled_only:
        assert "no float16" in red("PAR001", subject).reason
    else:
        figures = green("PAR001", subject).figures
        assert figures["float16"] == "not run: eager decoding raises ValueError: no float16"
        assert figures["bfloat16"]["compared"] == 25, "the prompt and 24 steps"


def test_float32_must_run(tmp_path: Path) -> None:
    refusal = "            if x.dtype == mx.float32:\n                raise ValueError('no float32')\n"
    subject = new_subject(module=mutated(tmp_path, (_OFFSET, refusal + _OFFSET)))
    assert "no float32" in red("PAR001", subject).reason
    assert "no float32" in red("PAR001", replace(subject, dtype="bfloat16")).reason


def test_a_dtype_that_was_asked_for_and_is_refused_is_undecided(tmp_path: Path) -> None:
    refusal = "            if x.dtype == mx.float16:\n                raise ValueError('no float16')\n"
    subject = new_subject(module=mutated(tmp_path, (_OFFSET, refusal + _OFFSET)), dtype="float16")
    result = only("PAR001", subject)
    assert (result.status, result.reason) == (
        "not-run",
        "float16 not run: eager decoding raises ValueError: no float16",
    )


LOGITS = {
    "frozen_write": "step 1",
    "write_one_late": "step 1",
    "write_one_early": "step 1",
    "write_dropped_from_16": "step 4",
    "keys_and_values_swapped": "step 1",
    "values_never_written": "step 1",
    "buffer_made_anew": "step 1",
    "position_stands_still": "step 2",
    "rope_one_late": "step 1",
    "rope_one_early": "step 1",
    "mask_hides_the_token_itself": "step 1",
    "mask_shows_one_ahead": "step 1",
    "mask_forgets_the_first_token": "step 1",
    "mask_shows_all": "step 1",
    "unwritten_slots_hold_nan": "step 1",
    "caches_in_another_order": "step 2",
    "cache_in_half_precision": "step 1",
    "adopted_one_short": "step 1",
}
"""The first step at which logits are wrong after a prompt of 13."""


@pytest.mark.parametrize("fault", LOGITS)
def test_wrong_logits_are_red_at_the_first_wrong_step(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    FAULTS[fault](monkeypatch)
    result = red("PAR001", new_subject())
    assert result.where == f"{LOGITS[fault]} after a prompt of 13, float32"
    assert "wanted" in result.reason
    assert "allowed 0 (exact)" in result.reason


@pytest.mark.parametrize("fault", ["state_comes_out_wider", "position_as_python_int"])
def test_a_second_trace_is_red_and_says_why(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    FAULTS[fault](monkeypatch)
    reason = red("PAR001", new_subject()).reason
    assert "times in 16 steps, wanted 1: retraced because of" in reason
    assert ("state[0][0]" if fault == "state_comes_out_wider" else "pos: int 13 → int 14") in reason


def test_a_position_from_the_key_length_is_red_in_the_trace_and_in_numbers(tmp_path: Path) -> None:
    """The graph is the same at every position, but not at every rung."""
    subject = new_subject(module=mutated(tmp_path, *MUTATIONS["position_from_key_length"]))
    assert "constant int32[] 2052 became int32[] 58, used by RoPE" in red("TRC001", subject).reason
    assert red("PAR001", subject).reason.startswith("logits differ at step 1 after a prompt of 13")


@pytest.mark.parametrize("mutation", ["mask_made_true", "mask_inverted_after"])
def test_a_mistake_that_leaves_the_graph_constant_is_red(mutation: str, tmp_path: Path) -> None:
    """Such a graph is the same at every position, so that the trace checks have nothing to say."""
    subject = new_subject(module=mutated(tmp_path, *MUTATIONS[mutation]))
    green("TRC001", subject)
    assert red("PAR001", subject).reason.startswith("logits differ at step 1 after a prompt of 13")


def test_an_aliased_position_is_red_where_queries_are_rotated_late(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    subject = new_subject(module=mutated(tmp_path, *MUTATIONS["rotated_after_the_update"]))
    green("PAR001", subject)
    FAULTS["position_in_place"](monkeypatch)
    subject = new_subject(module=subject.module)
    assert "logits differ at step 1" in red("PAR001", subject).reason


@pytest.mark.parametrize("fault", ["generate_skips_a_token", "generate_takes_the_second_best"])
def test_wrong_tokens_are_red(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    FAULTS[fault](monkeypatch)
    subject = new_subject()
    assert ", wanted " in red("PAR002", subject).reason
    green("PAR001", subject)


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("mask_of_a_chunk_shows_one_ahead", "logits differ at extend of 4 at position 16"),
        ("mask_row_all_false", "logits differ at extend of 4 at position 16"),
        ("extend_one_by_one_in_reverse", "logits differ at extend of 4 at position 16"),
        ("extend_compiles_again", "traced 2 times, wanted 1"),
    ],
)
def test_a_wrong_continuation_is_red(fault: str, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    FAULTS[fault](monkeypatch)
    subject = new_subject()
    assert reason in red("PAR003", subject).reason
    green("PAR001", subject)


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("prefill_skips_at_chunk_edges", "logits differ at prefill in chunks of 1"),
        ("mask_of_a_chunk_shows_one_ahead", "logits differ at extend in chunks of 2"),
    ],
)
def test_a_wrong_chunk_edge_is_red(fault: str, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    FAULTS[fault](monkeypatch)
    assert reason in red("PAR004", new_subject()).reason


KINDS = ("default", "linear", "llama3", "yarn", "longrope")


@st.composite
def configurations(draw: st.DrawFn) -> dict[str, Any]:
    """Draw a healthy tiny configuration; heads may be of any even width, and groups of any size."""
    family = draw(st.sampled_from(FAMILIES))
    heads_each, kv_heads = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    heads, width = heads_each * kv_heads, draw(st.sampled_from((4, 6, 8, 10, 16)))
    changes: dict[str, Any] = {
        "num_hidden_layers": draw(st.integers(1, 4)),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "hidden_size": heads * width,
        "intermediate_size": draw(st.sampled_from((24, 40, 64))),
        "vocab_size": draw(st.sampled_from((61, 64, 128))),
        "tie_word_embeddings": draw(st.booleans()),
    }
    if family == "llama":
        changes["head_dim"] = width
        changes["hidden_size"] = draw(st.sampled_from((heads * width, 28, 32)))
        changes["attention_bias"] = draw(st.booleans())
        changes["mlp_bias"] = draw(st.booleans())
    return with_rope(config_of(family, **changes), draw(st.sampled_from(KINDS)))


def _no_alarm(config: dict[str, Any], seed: int, families: tuple[str, ...]) -> None:
    subject = new_subject(config["model_type"], config=config, seed=seed)
    results = {
        found.code: only(found.code, subject)
        for found in all_checks()
        if found.code.startswith(families) and found.code != "PAR008"  # which is for patched models
    }
    wrong = {code: result.reason for code, result in results.items() if result.status != "pass"}
    assert not wrong, config


@settings(max_examples=30, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck))
@given(configurations(), st.integers(0, 2**31 - 1))
def test_no_false_alarm_of_a_trace_check_on_random_healthy_models(config: dict[str, Any], seed: int) -> None:
    _no_alarm(config, seed, ("TOP003", "TRC"))


@settings(max_examples=3, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck))
@given(configurations(), st.integers(0, 2**31 - 1))
def test_no_false_alarm_on_random_healthy_models(config: dict[str, Any], seed: int) -> None:
    _no_alarm(config, seed, ("PAR00", "STA", "MSK"))


@pytest.mark.nightly
@settings(max_examples=1000, deadline=None, suppress_health_check=list(HealthCheck))
@given(configurations(), st.integers(0, 2**31 - 1))
def test_no_false_alarm_on_a_thousand_healthy_models(config: dict[str, Any], seed: int) -> None:
    _no_alarm(config, seed, ("TRC", "ENV", "NEG", "PAR", "STA", "MSK", "CAP", "LIF"))
