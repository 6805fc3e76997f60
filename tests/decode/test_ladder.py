"""The ladder of rungs, and that a session takes exactly one trace on each."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from mlx_audit import CompiledDecodeSession
from mlx_audit.checks.runs import Eager
from mlx_audit.decode.ladder import next_rung, rung_for
from tiny_models import shared_model, tiny_model, tokens


def test_the_first_rungs() -> None:
    rungs = [256]
    while rungs[-1] < 8192:
        rungs.append(next_rung(rungs[-1]))
    assert rungs[:9] == [256, 512, 768, 1024, 1280, 1536, 1792, 2048, 2560]
    assert all(rung % 256 == 0 for rung in rungs)


@pytest.mark.parametrize(
    ("held", "capacity", "rung"),
    [
        (1, 512, 256),
        (256, 512, 256),
        (257, 512, 512),
        (512, 512, 512),
        (5, 37, 37),
        (300, 300, 300),
        (2049, 9000, 2560),
    ],
)
def test_the_lowest_rung_that_holds_the_tokens(held: int, capacity: int, rung: int) -> None:
    assert rung_for(held, capacity) == rung


def test_logits_are_bit_equal_across_a_rungs_edge_with_one_trace_a_rung() -> None:
    model, ids = shared_model(), tokens(525)
    session = CompiledDecodeSession(model, 1000, evidence="ignore")
    eager = Eager(model)
    session.prefill([ids[:250]])
    eager.feed(ids[:250])
    for start, stop in ((250, 260), (260, 505)):
        if start == 250:
            for token in ids[start:stop]:
                assert mx.array_equal(session.step([token]), eager.feed([token])).item()
        else:
            session.extend([ids[start:stop]])
            eager.feed(ids[start:stop])
    for token in ids[505:]:
        assert mx.array_equal(session.step([token]), eager.feed([token])).item()
    assert session.trace_count == 3, "rungs 256, 512 and 768"
    assert session.retrace_reasons == []


def test_one_trace_a_rung_from_1_to_2000_tokens_and_equal_bits_at_every_one() -> None:
    model, ids = tiny_model(num_hidden_layers=1), tokens(2000)
    session = CompiledDecodeSession(model, 2048, evidence="ignore")
    eager = Eager(model)
    session.prefill([ids[:1]])
    eager.feed(ids[:1])
    for held, token in enumerate(ids[1:], start=2):
        got, want = np.array(session.step([token])), np.array(eager.feed([token]))
        assert got.tobytes() == want.tobytes(), f"logits differ at {held} tokens"
        assert session.trace_count == -(-held // 256), "rungs of 256 slots up to 2,048, one trace each"
    assert session.retrace_reasons == []
