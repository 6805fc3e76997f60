"""The charts of bench: well-formed, with every number, readable by a screen reader, and nothing on top of another."""

from __future__ import annotations

import json
from itertools import combinations
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from command import mlx_audit
from mlx_audit.audit.bench_chart import SCHEMA, Chart, milliseconds, ratios

SVG = "{http://www.w3.org/2000/svg}"


def cell(capacity: int, fill: int, mean: float, **more: Any) -> dict[str, Any]:
    ratio = {"mean": mean, "low": mean - 0.05, "high": mean + 0.04}
    return {"capacity": capacity, "fill": fill, "ratio": ratio, "eager_ms": 9.5, "compiled_ms": 8.25, **more}


RESULTS: list[dict[str, Any]] = [
    {
        "schema": SCHEMA,
        "model": "one",
        "cells": [cell(c, f, 0.9 + c / 1e6 + f / 1e4) for c in (1024, 8192) for f in (64, 1030)],
    },
    {"schema": SCHEMA, "model": "x", "title": "two <&> 4 bits", "cells": [cell(8192, 260, 1.31)]},
]


def drawn(chart: Chart) -> ElementTree.Element:
    return ElementTree.fromstring(chart.svg())


def texts(root: ElementTree.Element) -> list[str]:
    return [str(node.text) for node in root.iter(f"{SVG}text")]


def test_each_ratio_stands_there_with_its_interval() -> None:
    root = drawn(ratios(RESULTS))
    shown = [node.text for node in root.iter(f"{SVG}text") if node.get("class") == "n"]
    assert shown == ["0.91", "1.00", "0.91", "1.01", "1.31"]
    titles = [node.text for node in root.iter(f"{SVG}title")]
    assert "one, tokens held 1,030, capacity 8,192: 1.01 (0.96 to 1.05)" in titles
    assert {"one", "two <&> 4 bits", "64", "260", "1,030", "capacity 1,024"} <= set(texts(root))


def test_points_lie_where_the_axis_says() -> None:
    root = drawn(ratios(RESULTS))
    ticks = [
        (float(str(node.text)), float(node.attrib["y"]) - 4)
        for node in root.iter(f"{SVG}text")
        if node.get("class") == "e"
    ]
    (low, bottom), (high, top) = ticks[0], ticks[-1]
    assert bottom > top
    groups = list(root.iter(f"{SVG}g"))
    wanted = [c["ratio"]["mean"] for result in RESULTS for c in result["cells"]]
    for group, value in zip(groups, wanted, strict=True):
        circle = group.find(f"{SVG}circle")
        assert circle is not None
        y = float(circle.attrib["cy"])
        assert low + (bottom - y) / (bottom - top) * (high - low) == pytest.approx(value, abs=2e-3)


def test_milliseconds_begin_at_zero_and_may_have_others() -> None:
    results = [{**RESULTS[0], "cells": [cell(512, 8, 1.0, others_ms={"another": 2.5}), cell(2048, 8, 1.0)]}]
    root = drawn(milliseconds(results))
    assert {"eager", "compiled", "another", "9.50", "8.25", "2.50", "0", "512", "2,048"} <= set(texts(root))


@pytest.mark.parametrize("chart", [ratios(RESULTS), milliseconds(RESULTS)], ids=["ratios", "ms"])
def test_no_text_covers_another_or_leaves_the_page(chart: Chart) -> None:
    root = drawn(chart)
    _, _, width, height = (float(word) for word in root.attrib["viewBox"].split())
    boxes = []
    for node in root.iter(f"{SVG}text"):
        x, y, text = float(node.attrib["x"]), float(node.attrib["y"]), str(node.text)
        size = 13 if node.get("class") == "h" else 10 if node.get("class") == "n" else 11
        wide = 0.55 * size * len(text)
        left = {"n": x - wide / 2, "m": x - wide / 2, "e": x - wide}.get(str(node.get("class")), x)
        boxes.append((text, left, left + wide, y - 0.8 * size, y + 0.2 * size))
    for text, left, right, top, bottom in boxes:
        assert min(left, top, width - right, height - bottom) >= 0, text
    for one, two in combinations(boxes, 2):
        apart = one[2] <= two[1] or two[2] <= one[1] or one[4] <= two[3] or two[4] <= one[3]
        assert apart, f"{one[0]!r} and {two[0]!r}"


@pytest.mark.parametrize("chart", [ratios(RESULTS), milliseconds(RESULTS)], ids=["ratios", "ms"])
def test_a_screen_reader_hears_title_and_numbers(chart: Chart) -> None:
    root = drawn(chart)
    names = root.attrib["aria-labelledby"].split()
    found = {node.get("id"): str(node.text) for node in root if node.get("id") in names}
    assert root.attrib["role"] == "img"
    assert found["t"] == chart.title
    assert all(f"{point.value:.2f}" in found["d"] for panel in chart.panels for point in panel.points)
    assert "prefers-color-scheme:dark" in chart.svg()


def test_the_command_draws_what_json_wrote(tmp_path: Path) -> None:
    stored, drawing = tmp_path / "found.json", tmp_path / "chart.svg"
    done = mlx_audit(
        "bench", "tiny", "--fill", "8", "--capacity", "32", "--blocks", "2", "--block-tokens", "2", "--json",
        "--svg", drawing,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    measured = drawing.read_text(encoding="utf-8")
    stored.write_text(done.stdout, encoding="utf-8")
    assert ratios([json.loads(done.stdout)]).svg() == measured
    assert mlx_audit("bench", "--from", stored, "--svg", drawing, "--ms").returncode == 0
    assert drawing.read_text(encoding="utf-8") == milliseconds([json.loads(done.stdout)]).svg()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "the results cannot be read"),
        ("[3]", "these are no results of bench"),
        ('{"schema": "mlx-audit/bench/1", "model": "x", "cells": [{}]}', "lack what the chart needs"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, content: str, message: str) -> None:
    stored = tmp_path / "x.json"
    stored.write_text(content, encoding="utf-8")
    done = mlx_audit("bench", "--from", stored, "--svg", tmp_path / "chart.svg")
    assert done.returncode == 2
    assert message in " ".join(done.stderr.split())
    assert not (tmp_path / "chart.svg").exists()
