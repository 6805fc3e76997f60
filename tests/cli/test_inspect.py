"""`mlx-audit inspect`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from command import mlx_audit
from mlx_audit import resources
from mlx_audit.audit.inspection import CAPACITIES, Inspection
from mlx_audit.caches import cache_class
from mlx_audit.cli.inspect import STRIP
from mlx_audit.manifests.kinds import KINDS
from model_files import FORWARD, PRINT, write_config, write_model

FROZEN = (
    "queries = self.rope(queries, offset=cache.offset)",
    "queries = self.rope(queries, offset=int(cache.offset))",
)


def test_a_family_shows_one_strip_a_variant() -> None:
    done = mlx_audit("inspect", "llama")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "llama  full  meta-llama--Llama-3.2-1B  rope llama3  claimed capable"
    assert lines[1] == "  " + "█" * 16
    assert lines[2].startswith("  █ linear ×16")
    assert lines[3].startswith("  a step at 1,024 tokens reads 2.47 GB of weights and ")
    assert "  ● the same graph at every position and history" in lines
    sliding = lines.index("llama  sliding  tiny  rope default  claimed undecided")
    assert lines[sliding + 1] == "  ▒█▒█"
    assert lines[sliding + 2].endswith("(1 rotating, 1 linear) × 2")
    assert "\x1b" not in done.stdout


def test_json_and_a_full_size_configuration() -> None:
    config = resources.model_audits() / "configurations" / "Qwen--Qwen2-7B.json"
    done = mlx_audit("inspect", "qwen2", "--config", config, "--json")
    assert done.returncode == 0, done.stderr
    (item,) = json.loads(done.stdout)["inspections"]
    assert (item["configuration"], item["layers"]) == ("Qwen--Qwen2-7B", ["linear"] * 28)
    assert [cost["capacity"] for cost in item["costs"]] == list(CAPACITIES)
    assert item["hazards"] == []


def test_hazards_and_prints_of_a_model_file(tmp_path: Path) -> None:
    model = write_model(tmp_path, "frozen", FROZEN, (FORWARD, PRINT))
    done = mlx_audit("inspect", model, "--config", write_config(tmp_path), "--json")
    assert done.returncode == 0, done.stderr
    (item,) = json.loads(done.stdout)["inspections"]
    assert item["variant"] == "default"
    assert len(item["hazards"]) == 1
    assert item["hazards"][0].startswith("frozen.py:")
    assert "hello from the model" in done.stderr


def test_a_bad_target_is_a_usage_error() -> None:
    done = mlx_audit("inspect", "nothing-of-this-name")
    assert done.returncode == 2
    assert "no such target" in done.stderr


def test_every_cache_kind_has_a_glyph_of_its_own() -> None:
    assert set(STRIP) == set(KINDS)
    assert len({glyph for glyph, _ in STRIP.values()}) == len(STRIP)
    assert cache_class("linear") is not None


@pytest.mark.parametrize(
    ("layers", "pattern"),
    [
        (["linear"] * 3, "3 linear"),
        (["rotating(window=8, keep=0)", "linear"] * 2, "(1 rotating, 1 linear) × 2"),
        ((["arrays(slots=2)"] * 3 + ["linear"]) * 12, "(3 arrays, 1 linear) × 12"),
        (["linear", "none", "none", "linear"], "1 linear, 2 none, 1 linear"),
        ([], ""),
    ],
)
def test_runs_are_grouped(layers: list[str], pattern: str) -> None:
    assert Inspection("f", "v", "c", "default", None, layers).pattern() == pattern
