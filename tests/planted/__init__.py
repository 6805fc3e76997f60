"""Planted faults: what is wrong with a cache, a step or a session in each, as a small patch of ours.

A fault is a function of pytest's `monkeypatch`; its docstring says what somebody would have done wrong. Each file of
this folder is found by itself.
"""

from __future__ import annotations

import importlib
import pkgutil

from planted.registry import FAULTS

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")

__all__ = ["FAULTS"]
