"""Experts chosen in the graph."""

from __future__ import annotations

import re

import pytest

from mlx_audit.errors import MlxAuditError
from patched_families import apart, compiled, eager, equal, mended, model_of, source_of, text, untouched

NAME = "experts_on_device"
DBRX = source_of("dbrx")
PROMPT, FOLLOWING = text(13), text(12, seed=4)

LOOP = """\
import mlx.core as mx
import mlx.nn as nn


class Choice(nn.Module):
    def __init__(self, count):
        self.parts = [nn.Linear(8, 8) for _ in range(count)]

    def __call__(self, h, weights, chosen):
        h = h.reshape(-1, h.shape[-1])
        # What the chosen parts say.
        out = []
        for row, weight, ids in zip(h, weights, chosen.tolist()):
            part = mx.stack([self.parts[i](row) for i in ids], axis=-1)
            part = (part * weight).sum(axis=-1)
            out.append(part)
        out = mx.stack(out, axis=0)
        return out
"""


def test_a_step_is_compiled_and_equals_eager_decoding() -> None:
    with pytest.raises((MlxAuditError, ValueError), match="eval"):
        compiled(model_of("dbrx"), PROMPT, FOLLOWING)
    patched = model_of("dbrx", NAME)
    assert equal(compiled(patched, PROMPT, FOLLOWING), eager(patched, PROMPT, FOLLOWING))


def test_a_single_token_gets_what_it_got_bit_for_bit() -> None:
    patched, own = model_of("dbrx", NAME), model_of("dbrx")
    assert equal(eager(patched, PROMPT, FOLLOWING, chunk=1), eager(own, PROMPT, FOLLOWING, chunk=1))
    assert apart(eager(patched, PROMPT, FOLLOWING), eager(own, PROMPT, FOLLOWING)) < 1e-5


def test_the_same_loop_is_mended_elsewhere() -> None:
    after = mended(LOOP, NAME)
    assert (
        after
        == LOOP[: LOOP.index("        out = []")]
        + """\
        # The ids of the experts stay on the device, so each expert reads each token
        out = mx.stack([expert(h) for expert in self.parts], axis=-1)
        out = mx.take_along_axis(out, chosen[:, None], axis=-1)
        out = (out * weights[:, None]).sum(axis=-1)
        return out
"""
    )


@pytest.mark.parametrize("source", [DBRX, LOOP], ids=["dbrx", "elsewhere"])
def test_a_second_time_nothing_is_left_to_mend(source: str) -> None:
    assert untouched(mended(source, NAME), NAME)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("axis=-1)\n            part =", "axis=0)\n            part ="),  # another axis
        (".sum(axis=-1)", ".max(axis=-1)"),  # another choice
        ("out = mx.stack(out, axis=0)", "out = mx.stack(out, axis=1)"),
        ("            out.append(part)\n", "            out.append(part)\n            print(ids)\n"),
        ("        return out\n", "        return out, ids\n"),  # read afterwards
        ("h = h.reshape(-1, h.shape[-1])", "h = h.reshape(2, -1, h.shape[-1])"),  # no rows of tokens
        ("h = h.reshape(-1, h.shape[-1])", "h = h.reshape(1, 8, 8)\n        h = h.reshape(-1, h.shape[-1])"),
        ("[nn.Linear(8, 8) for _ in range(count)]", "{i: nn.Linear(8, 8) for i in range(count)}"),
    ],
)
def test_what_is_not_understood_is_left_alone(old: str, new: str) -> None:
    assert old in LOOP
    assert untouched(LOOP.replace(old, new), NAME)


def test_tokens_may_not_have_the_name_that_the_experts_get() -> None:
    assert untouched(re.sub(r"\bh\b", "expert", LOOP), NAME)
