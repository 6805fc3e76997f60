"""Mutated copies of mlx-lm's llama: the subjects that the trace proof must tell from the original."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mlx_audit.adapters import adapter_for
from mlx_audit.models.build import build_lazy, resolve_arguments
from mlx_audit.models.modules import import_file
from mlx_audit.tracing import StepTracer, TraceFailed, TraceProof, prove
from tiny_models import config_of, module_of

_numbers = itertools.count()

Replacements = list[tuple[str, str]]


def mutate(source: str, replacements: Replacements) -> str:
    """Return `source` with each text replaced; a text that is not there would make a test that proves nothing."""
    for old, new in replacements:
        assert old in source, old
        source = source.replace(old, new, 1)
    return source


@pytest.fixture
def mutant(tmp_path: Path) -> Callable[..., Any]:
    """Return a function that writes a mutated llama and builds it lazily."""

    def build(replacements: Replacements, **changes: Any) -> Any:
        source = Path(module_of("llama").__file__).read_text(encoding="utf-8")
        path = tmp_path / f"mutant_{next(_numbers)}.py"
        path.write_text(mutate(source, replacements), encoding="utf-8")
        module = import_file(path)
        return build_lazy(module, resolve_arguments(module, config_of("llama", **changes)))

    return build


def proof_of(model: Any) -> TraceProof:
    """Return the proof of a model."""
    return prove(StepTracer(model, adapter_for(model, evidence="ignore")))


def findings(model: Any) -> list[str]:
    """Return what the trace proof alone says against a model; empty where it says nothing."""
    try:
        return proof_of(model).differences
    except TraceFailed as error:
        assert error.where, error
        return [f"{error.where}: {error.found}"]
