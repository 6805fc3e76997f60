"""Fixtures of the prefix tests; the models are in `prefix_models.py`."""

from __future__ import annotations

import pytest

from prefix_models import MODELS


@pytest.fixture(params=MODELS)
def family(request: pytest.FixtureRequest) -> str:
    """A family's name; a test that asks for it runs for each."""
    return str(request.param)
