"""The codes of all checks, read from their source: importing them would load MLX into the command line's process."""

from __future__ import annotations

import re
from pathlib import Path

import mlx_audit

_CODE = re.compile(r'^    code(?:: ClassVar\[str\])? = "([A-Z]{3}\d{3})"$', re.MULTILINE)


def known_codes() -> list[str]:
    """Return the codes in alphabetical order."""
    folder = Path(mlx_audit.__file__).parent / "checks"
    return sorted(
        code for path in folder.glob("*.py") for code in _CODE.findall(path.read_text(encoding="utf-8"))
    )
