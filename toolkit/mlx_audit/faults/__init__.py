"""Planted faults: deliberate defects that the audit must see. Each file of this folder is found by itself."""

from __future__ import annotations

import importlib
import pkgutil

from mlx_audit.faults.base import FAULTS, DoesNotApply, Fault, Patch, planted

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")

__all__ = ["FAULTS", "DoesNotApply", "Fault", "Patch", "planted"]
