"""Which checkpoint folder a live model was loaded from; light imports."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

_folders: dict[int, tuple[weakref.ref[Any], Path]] = {}
"""By identity: models are dicts, and so not hashable."""


def remember(model: Any, folder: Path) -> None:
    """Remember, for as long as the model lives, that its weights came from `folder`."""
    identity = id(model)
    reference = weakref.ref(model, lambda _: _folders.pop(identity, None))
    _folders[identity] = (reference, folder.resolve())


def folder_of(model: Any) -> Path | None:
    """Return the folder that a model was loaded from by mlx-audit, or None."""
    reference, folder = _folders.get(id(model), (None, None))
    return folder if reference is not None and reference() is model else None
