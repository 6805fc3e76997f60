"""The register of planted faults."""

from __future__ import annotations

from collections.abc import Callable

import pytest

Patch = pytest.MonkeyPatch
Fault = Callable[[Patch], None]
FAULTS: dict[str, Fault] = {}


def fault(function: Fault) -> Fault:
    """Register a fault under its own name."""
    FAULTS[function.__name__] = function
    return function
