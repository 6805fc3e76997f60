"""Far positions: thresholds that the other checks never reach."""

from __future__ import annotations

from pathlib import Path

import pytest
from mlx_lm.models.cache import RotatingKVCache

from audited import green, healthy, new_subject, red
from kind_models import kind_subject
from mlx_audit.checks.far import compare_far
from mlx_audit.faults import FAULTS
from mlx_audit.models.modules import import_file
from tiny_models import module_of

ROPE = "            queries = self.rope(queries, offset=cache.offset)\n"
MASK = "        fa_mask = create_attention_mask(h, cache[self.fa_idx])\n"


def changed(folder: Path, old: str, new: str) -> object:
    source = Path(module_of("llama").__file__ or "").read_text(encoding="utf-8")
    assert old in source
    path = folder / "changed.py"
    path.write_text(source.replace(old, new, 1), encoding="utf-8")
    return import_file(path)


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_healthy(family: str) -> None:
    figures = green("PAR007", healthy(family)).figures
    assert figures["max_difference"] == 0.0
    assert figures["rungs"] >= 3


def test_a_branch_on_a_host_integer_is_red(tmp_path: Path) -> None:
    late = (
        "            if isinstance(cache.offset, int) and cache.offset > 1000:\n"
        "                queries = queries * 1.1\n"
    )
    subject = new_subject(module=changed(tmp_path, ROPE, late + ROPE))
    green("TRC001", subject)
    green("PAR001", subject)
    assert "after a prompt of 1100, capacity 1300" in red("PAR007", subject).reason


def test_a_long_continuation_without_a_mask_is_red(tmp_path: Path) -> None:
    long = MASK + "        if h.shape[1] > 64:\n            fa_mask = 'causal'\n"
    subject = new_subject(module=changed(tmp_path, MASK, long))
    green("PAR003", subject)
    assert "65 more at position" in red("PAR007", subject).reason


def test_a_stack_of_rings_has_one_trace_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    subject = new_subject("qwen2", exactness="reordered")
    rings = lambda model: [RotatingKVCache(8) for _ in model.layers]  # noqa: E731
    monkeypatch.setattr(subject.module.Model, "make_cache", rings, raising=False)
    assert green("PAR007", subject).figures["rungs"] == len(subject.amounts.late)
    FAULTS["rungs_go_on_beyond_the_ring"](monkeypatch)
    assert ", wanted 1" in red("PAR007", subject).reason


def test_a_recurrent_stack_reads_the_shortest_prompt_in_the_quick_profile() -> None:
    config = {
        "model_type": "mamba2",
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_heads": 4,
        "head_dim": 8,
        "state_size": 8,
        "n_groups": 1,
        "conv_kernel": 4,
        "vocab_size": 64,
        "layer_norm_epsilon": 1e-6,
        "use_bias": False,
        "use_conv_bias": True,
        "tie_word_embeddings": True,
        "time_step_limit": [0.0, 1e9],
        "time_step_rank": 2,
        "max_position_embeddings": 4096,
    }
    figures = green("PAR007", new_subject("mamba2", config=config)).figures
    assert (figures["prompts"], figures["left_out"], figures["rungs"]) == ([250], [1100], 1)


FAR = {
    "a threshold": "if isinstance(cache.offset, int) and cache.offset > 1200:",
    "a multiple": "if isinstance(cache.offset, int) and cache.offset % 1024 == 0:",
}


@pytest.mark.parametrize("name", FAR)
def test_a_branch_that_no_prompt_reaches_is_red(name: str, tmp_path: Path) -> None:
    branch = f"            {FAR[name]}\n                queries = queries * 1.2\n"
    subject = new_subject(module=changed(tmp_path, ROPE, branch + ROPE))
    assert "at the far position" in red("PAR007", subject).reason


@pytest.mark.parametrize(("dtype", "named"), [("bfloat16", "599, bfloat16"), ("int16", "32767, float32")])
def test_a_position_that_loses_digits_is_red(dtype: str, named: str, tmp_path: Path) -> None:
    through = "x.dtype" if dtype == "bfloat16" else f"mx.{dtype}"
    short = (
        "            position = cache.offset\n"
        "            if isinstance(position, mx.array):\n"
        f"                position = position.astype({through}).astype(mx.int32)\n"
    )
    rotated = ROPE.replace("cache.offset", "position")
    subject = new_subject(module=changed(tmp_path, ROPE, short + rotated))
    green("PAR001", subject)
    assert named in red("PAR007", subject).reason


def test_a_cache_without_tokens_has_no_far_position() -> None:
    assert compare_far(kind_subject("arrays"), [599]) == []


@pytest.mark.parametrize("kind", ["rotating", "chunked", "quantized", "keeping", "composite"])
def test_every_kind_of_cache_stands_at_a_far_position(kind: str) -> None:
    assert compare_far(kind_subject(kind), [599, 8_191]) == [599, 8_191]
