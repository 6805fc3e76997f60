"""The wheel and the source distribution have what they need; the wheel works away from the checkout."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from mlx_audit import resources

pytestmark = pytest.mark.xdist_group("packaging")
ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel and the source distribution, built without network."""
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "hatchling", "build", "-d", str(folder)]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    return folder


@pytest.fixture(scope="module")
def unpacked(built: Path) -> Path:
    folder = built / "unpacked"
    with zipfile.ZipFile(next(built.glob("*.whl"))) as wheel:
        wheel.extractall(folder)
    return folder


def test_the_wheel_has_the_data_of_the_checkout(unpacked: Path) -> None:
    data = unpacked / "mlx_audit" / "_data"
    for name in ("model_audits", "schemas"):
        wanted = {path.relative_to(ROOT) for path in (ROOT / name).rglob("*") if path.is_file()}
        assert {path.relative_to(data) for path in (data / name).rglob("*") if path.is_file()} == wanted
    assert (unpacked / "mlx_audit" / "py.typed").is_file()
    entry_points = next(unpacked.glob("*.dist-info/entry_points.txt")).read_text()
    assert "mlx-audit = mlx_audit.cli:main" in entry_points
    assert "[pytest11]\nmlx_audit = mlx_audit.pytest_plugin" in entry_points


def test_the_wheel_validates_its_own_manifests(unpacked: Path, tmp_path: Path) -> None:
    code = (
        f"import sys; sys.path.insert(0, {str(unpacked)!r}); sys.argv = ['mlx-audit', 'validate']\n"
        "import mlx_audit; from mlx_audit import resources\n"
        f"assert mlx_audit.__file__.startswith({str(unpacked)!r}), mlx_audit.__file__\n"
        "assert resources.model_audits().parent.name == '_data'\n"
        "assert resources.repository() is None\n"
        "from mlx_audit.cli import main; main()"
    )
    run = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ},
    )
    assert run.returncode == 0, run.stderr
    count = len(list(resources.model_audits().glob("*.yaml")))
    assert f"{count} manifests: {count} valid" in run.stderr


def test_the_source_distribution_can_be_tested(built: Path) -> None:
    with tarfile.open(next(built.glob("*.tar.gz"))) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    wanted = {
        "pyproject.toml",
        "LICENSE",
        "Makefile",
        ".ci/run",
        "tests/conftest.py",
        "model_audits/qwen2.yaml",
    }
    assert wanted <= names
    assert not {name for name in names if "__pycache__" in name or name.startswith((".git/", ".venv"))}
