"""`mlx-audit inspect`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from command import mlx_audit
from mlx_audit import resources
from mlx_audit.audit.inspection import CAPACITIES, Inspection, _sees
from mlx_audit.caches import cache_class
from mlx_audit.cli._strip import GLYPHS, glyphs, rows
from mlx_audit.manifests import CacheSpec
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
    assert lines[0] == "source  llama.py"
    assert lines[1].startswith("  ? mlx_lm/models/rope_utils.py:260:19 SRC001 max()/min(): ")
    family = lines.index("")
    assert lines[family - 1].startswith(("  ● stays in the graph: ", "    "))
    del lines[: family + 1]
    assert lines[:3] == [
        "llama  full  meta-llama--Llama-3.2-1B",
        "  16 layers: 16×linear",
        "  rope llama3, claimed capable",
    ]
    assert lines[4] == "     0  ██████████ ██████"
    assert lines[6] == "  █  16 × linear  sees all before it"
    assert "  a step reads 2.47 GB of weights in " in done.stdout
    assert "  ● the same graph at every position and history" in lines
    sliding = lines.index("llama  sliding  tiny")
    assert lines[sliding + 1] == "  4 layers: (1×rotating, 1×linear) × 2"
    assert lines[sliding + 4] == "     0  ▄█ ▄█"
    assert lines[sliding + 6] == "  ▄   2 × rotating(window=8, keep=0)  sees the last 8, itself one of them"
    assert "\x1b" not in done.stdout
    assert max(map(len, lines)) <= 80


def test_json_and_a_full_size_configuration() -> None:
    config = resources.model_audits() / "configurations" / "Qwen--Qwen2-7B.json"
    done = mlx_audit("inspect", "qwen2", "--config", config, "--json")
    assert done.returncode == 0, done.stderr
    (item,) = json.loads(done.stdout)["inspections"]
    assert (item["configuration"], item["layers"]) == ("Qwen--Qwen2-7B", ["linear"] * 28)
    assert [cost["capacity"] for cost in item["costs"]] == list(CAPACITIES)
    assert item["hazards"] == []
    assert (item["pattern"], item["counts"]) == ("28×linear", {"linear": 28})
    assert item["sees"] == {"linear": "all before it"}
    assert list(item["masks"]) == ["linear over 2053 keys"]


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
    assert set(GLYPHS) == set(KINDS)
    assert len({glyph for glyph, _ in GLYPHS.values()}) == len(GLYPHS)
    assert cache_class("linear") is not None


@pytest.mark.parametrize(
    ("layers", "pattern"),
    [
        (["linear"] * 3, "3×linear"),
        (["rotating(window=8, keep=0)", "linear"] * 2, "(1×rotating, 1×linear) × 2"),
        ((["arrays(slots=2)"] * 3 + ["linear"]) * 12, "(3×arrays, 1×linear) × 12"),
        (
            (["rotating(window=8, keep=0)"] * 5 + ["linear"]) * 5 + ["linear"],
            "(5×rotating, 1×linear) × 4, 5×rotating, 2×linear",
        ),
        (
            (["arrays(slots=2)"] * 2 + ["linear"]) * 8 + ["arrays(slots=2)"] * 2,
            "(2×arrays, 1×linear) × 8, 2×arrays",
        ),
        (["linear", "none", "none", "linear"], "1×linear, 2×none, 1×linear"),
        (["arrays(slots=1)", "arrays(slots=2)"] * 2, "(1×arrays(slots=1), 1×arrays(slots=2)) × 2"),
        ([], ""),
    ],
)
def test_runs_are_grouped(layers: list[str], pattern: str) -> None:
    assert Inspection("f", "v", "c", "default", None, layers).pattern() == pattern


@pytest.mark.parametrize(
    ("layers", "firsts", "groups"),
    [
        (["linear"] * 25, [0], [[10, 10, 5]]),
        ((["arrays"] * 3 + ["linear"]) * 15, [0, 40], [[4] * 10, [4] * 5]),
        ((["arrays"] * 2 + ["rotating"]) * 16 + ["arrays"] * 2, [0, 39], [[3] * 13, [3, 3, 3, 2]]),
        (["linear"] * 9 + ["arrays"], [0], [[10]]),
        ([], [], []),
    ],
)
def test_rows_are_numbered_and_grouped_by_what_repeats(
    layers: list[str], firsts: list[int], groups: list[list[int]]
) -> None:
    drawn = list(rows(layers))
    assert [first for first, _ in drawn] == firsts
    assert [[len(group) for group in row] for _, row in drawn] == groups
    assert [label for _, row in drawn for group in row for label in group] == layers


def test_an_unknown_class_is_a_question_mark() -> None:
    name = "mlx_lm.models.deepseek_v41.LayerCache"
    assert glyphs([name]) == {name: ("?", "bold red")}


def test_two_sets_of_parameters_of_a_kind_look_different() -> None:
    labels = ["arrays(slots=1)", "linear", "arrays(slots=2)", "linear", "arrays(slots=1)"]
    assert [glyphs(labels)[label][0] for label in labels] == ["○", "█", "2", "█", "○"]


LINEAR = CacheSpec("linear")
STATE = CacheSpec("arrays", (("slots", 2),))


@pytest.mark.parametrize(
    ("spec", "sees"),
    [
        (LINEAR, "all before it"),
        (CacheSpec("rotating", (("window", 8), ("keep", 0))), "the last 8, itself one of them"),
        (
            CacheSpec("rotating", (("window", 8), ("keep", 2))),
            "the first 2, and the last 6, itself one of them",
        ),
        (CacheSpec("chunked", (("chunk", 16),)), "those before it in its chunk of 16"),
        (CacheSpec("quantized", (("bits", 4), ("group_size", 32))), "all before it, in 4 bits"),
        (STATE, "none, only a state"),
        (
            CacheSpec("composite", (), (STATE, LINEAR)),
            "none, only a state; all before it",
        ),
        (CacheSpec("composite", (), (LINEAR, LINEAR)), "all before it"),
        (CacheSpec("none"), "no cache of its own"),
        (CacheSpec("a.b.LayerCache"), "not known"),
    ],
)
def test_what_a_token_sees(spec: CacheSpec, sees: str) -> None:
    assert _sees(spec) == sees
