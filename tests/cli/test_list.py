"""`mlx-audit list`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from mlx_audit import resources
from mlx_audit.cli import application
from mlx_audit.evidence.environment import backend
from mlx_audit.evidence.records import record_path
from mlx_audit.manifests import load_manifests


def test_the_table_has_a_row_a_variant() -> None:
    result = CliRunner().invoke(application(), ["list"])
    assert result.exit_code == 0
    rows = [line.split() for line in result.stdout.splitlines()[1:]]
    wanted = [[manifest.family, name] for manifest in load_manifests() for name in manifest.variants]
    assert [row[:2] for row in rows] == wanted
    assert ["llama", "sliding", "reordered", "capable"] in [row[:4] for row in rows]


def test_json_is_a_matrix_for_ci() -> None:
    result = CliRunner().invoke(application(), ["list", "--json"])
    assert result.exit_code == 0
    rows = {(row["family"], row["variant"]): row for row in json.loads(result.stdout)["include"]}
    full = rows["llama", "full"]
    assert full["claims"] == {"compiled_decode": "capable", "prefix_restore": "capable"}
    assert full["rope"]["dynamic"] == "undecided"
    assert full["exactness"] == "exact"
    assert isinstance(full["record"], str)
    assert isinstance(full["prefix_record"], str)
    assert rows["jamba", "hybrid"]["prefix_record"] == "none"


def test_what_a_record_says_is_no_markup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its folder, and what is found in it, may have brackets and controls in them."""
    folder = tmp_path / "[x]\x1b[31m[/red]"
    monkeypatch.setenv("MLX_AUDIT_RECORDS", str(folder))
    monkeypatch.setenv("COLUMNS", "1000")
    path = record_path(folder, "qwen2", backend())
    path.parent.mkdir(parents=True)
    path.write_text("{}")
    found = CliRunner().invoke(application(), ["list"])
    assert found.exit_code == 0, found.exception
    assert "[x]\\x1b[31m[/red]" in found.stdout
    assert "\x1b" not in found.stdout


def test_the_record_column_says_what_the_gate_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A record of a helper that was another is stale, with the file; one that is damaged is no proof."""
    monkeypatch.setenv("MLX_AUDIT_RECORDS", str(tmp_path))
    here = backend()
    for family, change in (("qwen2", '"verdict": "capable"'), ("mamba2", None)):
        shipped = record_path(resources.model_audits() / "records", family, "cpu")
        path = record_path(tmp_path, family, here)
        path.parent.mkdir()
        text = shipped.read_text(encoding="utf-8")
        path.write_text(text if change is None else text.replace(change, '"verdict": "limited"'), "utf-8")
    found = CliRunner().invoke(application(), ["list", "--json"])
    rows = {(row["family"], row["variant"]): row["record"] for row in json.loads(found.stdout)["include"]}
    assert rows["qwen2", "full"].startswith("damaged (")
    assert "changed after it was written" in rows["qwen2", "full"]
    assert (
        rows["mamba2", "recurrent"] == "capable"
        if here == "cpu"
        else "damaged" in rows["mamba2", "recurrent"]
    )


def test_an_empty_folder_collects_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resources, "model_audits", lambda: tmp_path)
    for verb in ("list", "validate"):
        result = CliRunner().invoke(application(), [verb])
        assert result.exit_code == 3
        assert "found" in result.stderr


def test_a_broken_manifest_stops_the_list(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken.yaml").write_text("family: [\n")
    monkeypatch.setattr(resources, "model_audits", lambda: tmp_path)
    result = CliRunner().invoke(application(), ["list"])
    assert result.exit_code == 2
    assert "broken.yaml:2:1: not YAML" in result.stderr
