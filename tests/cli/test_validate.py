"""`mlx-audit validate`; the broken manifests themselves are in tests/manifests/test_broken.py."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from mlx_audit import resources
from mlx_audit.cli import application

BROKEN = Path(__file__).parents[1] / "manifests" / "broken"


def validate(*arguments: str | Path) -> Result:
    return CliRunner().invoke(application(), ["validate", *map(str, arguments)])


def test_one_is_told_as_one() -> None:
    assert (
        "1 manifest: 1 valid, 0 wrong, 0 problems" in validate(resources.model_audits() / "llama.yaml").stderr
    )


def test_shipped_manifests_are_valid() -> None:
    result = validate()
    assert result.exit_code == 0
    count = len(list(resources.model_audits().glob("*.yaml")))
    assert f"{count} manifests: {count} valid, 0 wrong, 0 problems" in result.stderr


def test_problems_of_all_named_files_are_shown() -> None:
    result = validate(
        BROKEN / "claim.yaml", BROKEN / "exactness.yaml", resources.model_audits() / "qwen2.yaml"
    )
    assert result.exit_code == 2
    assert "claim.yaml:15:31" in result.stderr
    assert "exactness.yaml:13:16" in result.stderr
    assert "3 manifests: 1 valid, 2 wrong, 2 problems" in result.stderr


def test_json_has_every_problem_and_nothing_else_on_stdout() -> None:
    result = validate("--json", BROKEN / "several.yaml")
    assert result.exit_code == 2
    written = json.loads(result.stdout)
    assert written["manifests"] == 1
    assert [(problem["line"], problem["column"]) for problem in written["problems"]] == [
        (1, 9),
        (9, 15),
        (13, 16),
        (15, 31),
    ]
    assert written["problems"][1]["fix"] == "did you mean 'linear'?"


@pytest.mark.parametrize("name", ["absent.yaml", "."])
def test_what_is_no_file_is_refused(name: str, tmp_path: Path) -> None:
    result = validate(tmp_path / name)
    assert result.exit_code == 2
    assert "cannot be read" in result.stderr


def test_a_copy_of_a_family_is_a_duplicate(tmp_path: Path) -> None:
    source = resources.model_audits()
    shutil.copytree(source / "configurations", tmp_path / "configurations")
    shutil.copy(source / "qwen2.yaml", tmp_path / "copy.yaml")
    result = validate(source / "qwen2.yaml", tmp_path / "copy.yaml")
    assert result.exit_code == 2
    assert "another manifest has this family; found: 'qwen2'" in result.stderr
