"""`mlx-audit schema`."""

from __future__ import annotations

import json
from pathlib import Path

from typer.testing import CliRunner, Result

from mlx_audit import resources
from mlx_audit.cli import application
from mlx_audit.manifests import manifest_schema


def schema(*arguments: str | Path) -> Result:
    return CliRunner().invoke(application(), ["schema", *map(str, arguments)])


def test_it_prints_the_schema() -> None:
    result = schema()
    assert result.exit_code == 0
    assert json.loads(result.stdout) == manifest_schema()


def test_it_writes_what_it_prints_and_leaves_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "manifest.schema.json"
    path.write_text("old")
    assert schema("-o", path).exit_code == 0
    assert path.read_text() == schema().stdout
    assert list(tmp_path.iterdir()) == [path]
    assert path.stat().st_mode & 0o777 == 0o644


def test_it_cannot_write_into_a_missing_folder(tmp_path: Path) -> None:
    result = schema("-o", tmp_path / "absent" / "schema.json")
    assert result.exit_code == 2
    assert "cannot be written" in result.stderr


def test_the_committed_file_passes_the_check_and_a_changed_one_does_not(tmp_path: Path) -> None:
    committed = resources.schemas() / "manifest.schema.json"
    assert schema("--check", committed).exit_code == 0
    changed = tmp_path / "schema.json"
    changed.write_text(committed.read_text().replace("family", "tribe"))
    result = schema("--check", changed)
    assert result.exit_code == 1
    assert f"fix: mlx-audit schema -o {changed}" in result.stderr


def test_a_missing_file_to_check_is_a_usage_error(tmp_path: Path) -> None:
    assert schema("--check", tmp_path / "absent.json").exit_code == 2
