"""Far positions: thresholds that the other checks never reach."""

from __future__ import annotations

from pathlib import Path

import pytest

from audited import green, healthy, new_subject, red
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
