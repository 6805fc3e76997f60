"""Tokens that a session generates, greedily and sampled."""

from __future__ import annotations

import pytest

from audited import green, healthy, new_subject, red
from mlx_audit.faults import FAULTS
from tiny_models import FAMILIES


@pytest.mark.parametrize("family", FAMILIES)
def test_sampled_tokens_are_healthy(family: str) -> None:
    first, second = green("PAR006", healthy(family)).figures["runs"]
    assert first["distinct_tokens"] > 1
    assert second["distinct_tokens"] > 1


@pytest.mark.parametrize("fault", ["generate_draws_twice", "sampler_gets_half_the_logits"])
def test_wrong_sampling_is_red(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    FAULTS[fault](monkeypatch)
    subject = new_subject()
    green("PAR002", subject)
    assert ", under seed 0" in red("PAR006", subject).reason
