"""What logits forget, the state remembers."""

from __future__ import annotations

import pytest

from audited import red
from kind_models import kind_subject
from mlx_audit.checks.runs import Eager, session_for, teacher_tokens
from mlx_audit.checks.tolerance import relative_difference
from mlx_audit.faults import FAULTS


def test_a_stale_recurrent_state_is_seen_although_logits_recover(monkeypatch: pytest.MonkeyPatch) -> None:
    """A state that lacks the last three tokens of the prompt is forgotten after some more; what it held was wrong."""
    subject = kind_subject("arrays")
    ids = teacher_tokens(subject, 49, stream=31)
    eager = Eager(subject.model)
    eager.feed(ids[:16])
    wanted = [eager.feed([token]) for token in ids[16:]]
    FAULTS["recurrent_state_three_tokens_stale"](monkeypatch)
    session = session_for(subject, 49)
    session.prefill([ids[:16]])
    got = [session.step([token]) for token in ids[16:]]
    gaps = [relative_difference(own, want) for own, want in zip(got, wanted, strict=True)]
    assert gaps[0] > 1e-3
    assert gaps[32] < 1e-4
    assert "caches[0] differs from eager's at the prompt" in red("STA001", subject).reason
