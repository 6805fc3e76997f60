"""Where data files are found."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlx_audit import resources
from mlx_audit.errors import MlxAuditError


def test_data_folders_exist() -> None:
    assert (resources.model_audits() / "qwen2.yaml").is_file()
    assert (resources.schemas() / "manifest.schema.json").is_file()
    assert resources.templates().is_dir()


def test_package_data_comes_before_the_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "_data" / "schemas").mkdir(parents=True)
    monkeypatch.setattr(resources, "files", lambda package: tmp_path)
    assert resources.schemas() == tmp_path / "_data" / "schemas"


def test_missing_data_is_a_typed_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resources, "files", lambda package: tmp_path)
    monkeypatch.setattr(resources, "repository", lambda: None)
    with pytest.raises(MlxAuditError, match=r"'templates' is missing; allowed: .*; fix: reinstall"):
        resources.templates()
