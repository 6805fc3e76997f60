"""Settings of the whole suite: Hypothesis profiles, chosen by --hypothesis-profile, else `ci` where CI is set."""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile("ci", deadline=None, derandomize=True, database=None, print_blob=True)
settings.register_profile("dev", deadline=None)
settings.register_profile(
    "nightly", deadline=None, max_examples=2000, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("ci" if os.environ.get("CI") else "dev")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what runs for minutes, unless the profile `nightly` is asked for."""
    if config.getoption("--hypothesis-profile", default=None) == "nightly":
        return
    for item in items:
        if item.get_closest_marker("nightly") is not None:
            item.add_marker(pytest.mark.skip(reason="only with --hypothesis-profile=nightly"))
