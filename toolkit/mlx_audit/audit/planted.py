"""A fault that the environment asks for in every audit; light imports, so that every parent can look."""

from __future__ import annotations

import os

from mlx_audit.errors import clean

PLANT = "MLX_AUDIT_PLANT"
"""Environment variable that names a fault to plant in every audit: for tests of what reads results."""


def planted_name() -> str | None:
    """Return the name of the fault that the environment asks for in every audit, or None."""
    return os.environ.get(PLANT) or None


def planted_warning() -> str | None:
    """Return what every run with a planted fault has to say, or None."""
    name = planted_name()
    return name and f"A FAULT IS PLANTED: {PLANT}={clean(name)}; these results say nothing of any model"
