"""The one module that knows where manifests, templates and schemas lie, installed or editable.

In a wheel they are package data under `mlx_audit/_data/`; in a checkout they are folders of the repository root.
"""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

from mlx_audit.errors import MlxAuditError


def model_audits() -> Path:
    """The folder of manifests, published configurations and records."""
    return _folder("model_audits")


def templates() -> Path:
    """The folder of jinja2 templates."""
    return _folder("templates")


def schemas() -> Path:
    """The folder of JSON Schemas."""
    return _folder("schemas")


def repository() -> Path | None:
    """The root of the checkout that an editable installation runs from, or None when installed from a wheel."""
    root = Path(__file__).resolve().parents[2]
    return root if (root / "pyproject.toml").is_file() and (root / "model_audits").is_dir() else None


def _folder(name: str) -> Path:
    """The first of package data and checkout that has the folder."""
    installed = Path(str(files("mlx_audit"))) / "_data" / name
    if installed.is_dir():
        return installed
    root = repository()
    if root is not None and (root / name).is_dir():
        return root / name
    raise MlxAuditError(
        f"the data folder {name!r} is missing",
        where=str(installed),
        allowed="package data of the wheel, or a checkout installed with `pip install -e .`",
        fix="reinstall mlx-audit",
    )
