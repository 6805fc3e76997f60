"""CompiledDecodeSession in any order of calls, against eager mlx-lm's recomputation from the list of token ids."""

from __future__ import annotations

import dataclasses
import functools
import tempfile
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, rule
from mlx_lm.models.cache import make_prompt_cache

from mlx_audit.decode import CompiledDecodeSession
from mlx_audit.errors import CapacityExceeded, SessionMisuse
from tiny_models import VOCABULARY, distance, shared_model, state_bytes

CAPACITY = 16
# Chunks of other lengths add up in another order; a wrong slot or position is off by 0.1 and more.
TOLERANCE = 1e-3

ids = st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=7)


@dataclasses.dataclass
class Run:
    """A session beside the ids that it was fed."""

    session: CompiledDecodeSession
    ids: list[int]
    started: bool = False
    """Whether it was prefilled ever; trimmed to nothing it still takes steps."""


@functools.lru_cache(maxsize=4096)
def recomputed(tokens: tuple[int, ...]) -> tuple[mx.array, list[tuple[np.ndarray, np.ndarray]]]:
    """Return eager logits after the last token, and each layer's keys and values, all in one call."""
    caches = make_prompt_cache(shared_model())
    logits = shared_model()(mx.array([tokens]), cache=caches)[:, -1]
    count = len(tokens)
    return logits, [tuple(np.array(part[..., :count, :]) for part in cache.state[:2]) for cache in caches]


class SessionMachine(RuleBasedStateMachine):
    """Feeds, forgets, copies and stores sessions."""

    runs = Bundle("runs")

    @initialize(target=runs)
    def start(self) -> Run:
        run = Run(_template().copy(), [])
        self.all = [run]
        return run

    def check_refusal(self, run: Run, call: Any) -> None:
        before = state_bytes(run.session)
        with pytest.raises((CapacityExceeded, SessionMisuse)):
            call()
        assert (run.session.position, state_bytes(run.session)) == (len(run.ids), before)

    @rule(run=runs, tokens=ids)
    def prefill(self, run: Run, tokens: list[int]) -> None:
        if run.ids:
            self.check_refusal(run, lambda: run.session.prefill([tokens]))
            return
        logits = run.session.prefill([tokens])
        run.ids, run.started = list(tokens), True
        assert distance(logits, recomputed(tuple(run.ids))[0]) < TOLERANCE

    @rule(run=runs, token=st.integers(0, VOCABULARY - 1))
    def step(self, run: Run, token: int) -> None:
        if not run.started or len(run.ids) == CAPACITY:
            self.check_refusal(run, lambda: run.session.step([token]))
            return
        logits = run.session.step([token])
        run.ids = [*run.ids, token]
        assert distance(logits, recomputed(tuple(run.ids))[0]) < TOLERANCE

    @rule(run=runs, tokens=ids)
    def extend(self, run: Run, tokens: list[int]) -> None:
        if not run.started or len(run.ids) + len(tokens) > CAPACITY:
            self.check_refusal(run, lambda: run.session.extend([tokens]))
            return
        logits = run.session.extend([tokens])
        run.ids = run.ids + tokens
        assert distance(logits, recomputed(tuple(run.ids))[0]) < TOLERANCE

    @rule(run=runs, n=st.integers(-1, CAPACITY))
    def trim(self, run: Run, n: int) -> None:
        if not run.ids:
            return
        possible = 0 < n <= len(run.ids)
        assert run.session.trim(n) == (n if possible else 0)
        if possible:
            run.ids = run.ids[: len(run.ids) - n]

    @rule(target=runs, run=runs)
    def copy(self, run: Run) -> Run:
        self.all.append(dataclasses.replace(run, session=run.session.copy()))
        return self.all[-1]

    @rule(run=runs)
    def through_a_file(self, run: Run) -> None:
        if not run.ids:
            return
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "session"
            run.session.save(path)
            loaded = CompiledDecodeSession.load(path, shared_model(), evidence="ignore")
        # The compiled step of the template serves it too; a trace each would make this test slow.
        loaded._step, loaded._rungs = run.session._step, run.session._rungs
        run.session = loaded

    @invariant()
    def state_and_position_are_those_of_the_ids(self) -> None:
        for run in getattr(self, "all", []):
            count = len(run.ids)
            assert (run.session.position, run.session.remaining) == (count, CAPACITY - count)
            if not count:
                continue
            layers = recomputed(tuple(run.ids))[1]
            for (keys, values, position), native in zip(run.session.state, layers, strict=True):
                assert position.tolist() == [count]
                for own, wanted in zip((keys, values), native, strict=True):
                    assert np.abs(np.array(own[..., :count, :]) - wanted).max() < TOLERANCE

    @invariant()
    def there_is_one_trace_at_most(self) -> None:
        assert _template().trace_count <= 1


_made: list[CompiledDecodeSession] = []


def _template() -> CompiledDecodeSession:
    """Return the session whose copies all runs are, so that the step is traced once."""
    if not _made:
        _made.append(CompiledDecodeSession(shared_model(), CAPACITY, evidence="ignore", prefill_step_size=4))
    return _made[0]


TestSession = SessionMachine.TestCase
TestSession.settings = settings(max_examples=25, stateful_step_count=20)
