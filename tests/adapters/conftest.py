"""Distributions that are really installed, for the time of one test."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from adapters.distributions import forget, write_distribution

Install = Callable[..., Path]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Install a distribution in this process: it is really on `sys.path`, and gone after the test."""
    before = set(sys.modules)

    def installed(name: str, files: Mapping[str, str], adapters: Mapping[str, str]) -> Path:
        site = write_distribution(tmp_path, name, files, adapters)
        monkeypatch.syspath_prepend(site)
        forget()
        return site

    forget()
    yield installed
    for name in set(sys.modules) - before:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]
    monkeypatch.undo()
    forget()
