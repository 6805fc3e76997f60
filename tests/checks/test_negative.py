"""NEG001: a subject that cannot fail proves nothing."""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx
import mlx.nn as nn
import pytest

from audited import green, healthy, new_subject, only, red
from mlx_audit.checks.subject import Subject
from tiny_models import FAMILIES


@pytest.mark.parametrize("family", FAMILIES)
def test_naive_compiling_is_wrong_from_the_second_step_on(family: str) -> None:
    figures = green("NEG001", healthy(family)).figures
    assert figures["wrong_steps"] == [2, 3, 4, 5, 6]
    assert figures["relative_differences"][0] == 0.0
    assert min(figures["relative_differences"][1:]) > 0.05
    assert "frozen write" in figures["finding"]


def _no_attention(model: nn.Module) -> None:
    for layer in model.layers:
        layer.self_attn.o_proj.weight = mx.zeros_like(layer.self_attn.o_proj.weight)


def _constant_logits(model: nn.Module) -> None:
    model.model.norm.weight = mx.zeros_like(model.model.norm.weight)


@pytest.mark.parametrize("blind", [_no_attention, _constant_logits])
def test_a_blind_model_is_red_though_all_else_is_green(
    blind: Callable[[nn.Module], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    own = Subject.tiny_model

    def tiny_model(self: Subject, dtype: str) -> nn.Module:
        model = own(self, dtype)
        blind(model)
        return model

    monkeypatch.setattr(Subject, "tiny_model", tiny_model)
    subject = new_subject()
    assert "wrong at steps [], wanted every step from 2 to 6" in red("NEG001", subject).reason
    assert only("PAR001", subject).status == "pass"
