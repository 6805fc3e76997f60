"""Paths as messages show them."""

from __future__ import annotations

from pathlib import Path


def short_path(path: Path) -> str:
    """Return a path from the installed package on, such as `mlx_lm/models/llama.py`; others keep their name."""
    parts = path.parts
    return "/".join(parts[parts.index("mlx_lm") :]) if "mlx_lm" in parts else path.name
