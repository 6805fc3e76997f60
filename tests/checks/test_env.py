"""ENV001: compilation happened, or the verdict is open; never green without it."""

from __future__ import annotations

from collections.abc import Iterator

import mlx.core as mx
import pytest

from audited import green, healthy, new_subject, only, red
from mlx_audit.checks import env
from mlx_audit.faults import FAULTS
from tiny_models import FAMILIES


@pytest.fixture
def uncompiled() -> Iterator[None]:
    mx.disable_compile()
    yield
    mx.enable_compile()


@pytest.mark.parametrize("family", FAMILIES)
def test_healthy(family: str) -> None:
    assert green("ENV001", healthy(family)).figures == {"probe_traces": 1, "calls": 4, "traces": 1}


@pytest.mark.parametrize(
    ("variable", "compiler", "reason"),
    [
        ("1", "g++", "MLX_DISABLE_COMPILE is set"),
        ("0", "g++", "any value counts"),
        (None, None, "no C++ compiler on PATH; install g++"),
        (None, "g++", "`mlx-audit doctor` shows more"),
    ],
)
def test_without_compilation_nothing_is_decided(
    variable: str | None, compiler: str | None, reason: str, uncompiled: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if variable is None:
        monkeypatch.delenv("MLX_DISABLE_COMPILE", raising=False)
    else:
        monkeypatch.setenv("MLX_DISABLE_COMPILE", variable)
    monkeypatch.setattr(env, "compiler", lambda: compiler)
    monkeypatch.setattr(env, "backend", lambda: "cpu")
    result = only("ENV001", healthy())
    assert result.status == "not-run"
    assert "ran the Python body 4 times in 4 calls" in result.reason
    assert reason in result.reason


def test_a_trace_a_token_is_red_and_names_the_argument(monkeypatch: pytest.MonkeyPatch) -> None:
    FAULTS["position_as_python_int"](monkeypatch)
    result = red("ENV001", new_subject())
    assert "traced 4 times in 4 calls, wanted 1" in result.reason
    assert "pos: int 3 → int 4" in result.reason


def test_other_configurations_only_probe() -> None:
    assert green("ENV001", new_subject(main=False)).figures == {"probe_traces": 1, "calls": 4}
