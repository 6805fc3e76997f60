"""Fixtures of the prefix tests; the models are in `prefix_models.py`."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from mlx_audit.prefix.store import save
from prefix_models import KEY, MODELS, WORLD, snapshot, text


@pytest.fixture(params=MODELS)
def family(request: pytest.FixtureRequest) -> str:
    """A family's name; a test that asks for it runs for each."""
    return str(request.param)


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a store with three entries; tests copy it before they change it."""
    folder = tmp_path_factory.mktemp("store")
    entries = [(KEY[:20], snapshot(length=20)), (KEY, snapshot()), (text(9, 2), snapshot("falcon_h1", 9))]
    save(folder, entries, WORLD)
    return folder


@pytest.fixture
def store(saved: Path, tmp_path: Path) -> Path:
    """Return a store that the test may change."""
    return Path(shutil.copytree(saved, tmp_path / "store"))
