"""Public bug reports, retold as small trials: each comes out as it should have, or is reported.

`T` is a tiny llama: 4 layers, 4 heads, 2 key-value heads of width 8, float32, matrices scaled by 3.
"""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache

from audited import green, healthy, new_subject, red
from mlx_audit.caches import FixedCapacityKVCache
from mlx_audit.checks.base import CheckFailed
from mlx_audit.checks.compared import require_one_slot_written
from mlx_audit.checks.masks import require_finite
from mlx_audit.decode import CompiledDecodeSession
from mlx_audit.decode.counted import CountedCompile
from mlx_audit.decode.state import check_state_tree, require_fixed_capacity
from mlx_audit.errors import CapacityExceeded, HostState
from mlx_audit.faults import FAULTS
from tiny_models import Eager, distance, shared_model, state_bytes, tiny_model, tokens


def _session(capacity: int, model: Any = None, **options: Any) -> CompiledDecodeSession:
    return CompiledDecodeSession(model or shared_model(), capacity, evidence="ignore", **options)


def test_mlx_swift_lm_406_greedy_decoding_loops_under_compile() -> None:
    """https://github.com/ml-explore/mlx-swift-lm/issues/406

    The position of a stock cache is a host integer. It becomes a constant of the trace, and so does every write.
    """
    model, ids, caches = shared_model(), tokens(13), make_prompt_cache(shared_model())
    with pytest.raises(HostState) as refused:
        require_fixed_capacity(caches)
    assert "position is host state" in str(refused.value)
    assert "KVCache.offset" in str(refused.value)

    eager = Eager(model)
    eager.feed([ids[:5]])
    mx.eval(model(mx.array([ids[:5]]), cache=caches))
    naive = mx.compile(lambda token: model(token, cache=caches)[:, -1], inputs=caches, outputs=caches)
    gaps = [distance(naive(mx.array([[token]])), eager.feed([[token]])) for token in ids[5:]]
    assert gaps[0] == 0.0
    assert min(gaps[1:]) >= 0.7
    assert {cache.offset for cache in caches} == {6}
    assert "frozen write" in green("NEG001", healthy()).figures["finding"]


class _Slot:
    """Holds arrays, as a cache object does."""

    def __init__(self) -> None:
        self.keys = mx.zeros((1, 1))


def test_mlx_2481_state_in_a_list_of_objects_is_dropped() -> None:
    """https://github.com/ml-explore/mlx/issues/2481

    MLX walks lists, tuples and dicts. What else it finds, it drops without an error, and its arrays are frozen.
    """
    check_state_tree([mx.zeros(1), mx.zeros(2)], name="cache")
    check_state_tree([(mx.zeros(1), mx.zeros(2))], name="cache")
    with pytest.raises(HostState, match="cache") as bare:
        check_state_tree((mx.zeros(1), mx.zeros(2)), name="cache")
    assert (bare.value.found, bare.value.fix) == ("tuple", "use list(cache)")
    with pytest.raises(HostState) as objects:
        check_state_tree([[mx.zeros(1)], [mx.zeros(1), _Slot()]], name="cache")
    assert objects.value.where == "cache[1][1]"
    assert "_Slot" in str(objects.value.found)


@pytest.fixture
def third_layer_raises() -> Iterator[Callable[[Any, int], None]]:
    """Make layer 2 of a model raise from its call number `after` on, until the end of the test or `after` below 0."""
    changed: list[tuple[Any, type]] = []

    def plant(model: Any, after: int) -> None:
        while changed:
            layer, own = changed.pop()
            layer.__class__ = own
        if after < 0:
            return
        layer, own, calls = model.layers[2], type(model.layers[2]), [0]

        def call(self: Any, *arguments: Any, **options: Any) -> Any:
            calls[0] += 1
            if calls[0] > after:
                raise RuntimeError("planted")
            return own.__call__(self, *arguments, **options)

        layer.__class__ = type(own.__name__, (own,), {"__call__": call})
        changed.append((layer, own))

    yield plant
    plant(None, -1)


def test_transformers_js_1745_a_failed_run_leaves_the_length_ahead(
    third_layer_raises: Callable[[Any, int], None],
) -> None:
    """https://github.com/huggingface/transformers.js/pull/1745

    Room was reserved and committed in one call, before the run had succeeded.
    """
    model, ids = tiny_model(), tokens(8)
    session, eager = _session(8, model, prefill_step_size=1), Eager(model)
    third_layer_raises(model, 2)  # the third eager call, in the middle of the prompt
    with pytest.raises(RuntimeError, match="planted"):
        session.prefill([ids[:4]])
    assert (session.position, session.remaining) == (0, 8)
    third_layer_raises(model, -1)
    logits = session.prefill([ids[:4]])
    for token in ids[:4]:
        wanted = eager.feed([[token]])
    assert distance(logits, wanted) == 0.0

    before = state_bytes(session)
    third_layer_raises(model, 0)  # the first compiled call, while it is traced
    with pytest.raises(RuntimeError, match="planted"):
        session.step([ids[4]])
    assert (session.position, session.trace_count) == (4, 0)
    assert state_bytes(session) == before
    third_layer_raises(model, -1)
    for token in ids[4:]:
        assert distance(session.step([token]), eager.feed([[token]])) == 0.0
    assert (session.position, session.trace_count) == (8, 1)


def test_mlx_3964_a_python_position_costs_a_trace_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """https://github.com/ml-explore/mlx/issues/3964

    Each value of a Python scalar makes an entry of its own in MLX's compile cache, for ever.
    """

    def step(buffer: mx.array, pos: Any) -> mx.array:
        return mx.slice_update(
            buffer, mx.ones((1, 1)), mx.array([pos]) if isinstance(pos, int) else pos, axes=(1,)
        )

    buffer = mx.zeros((1, 512))
    by_int = CountedCompile(step)
    for pos in range(300):
        mx.eval(by_int(buffer, pos))
        if pos == 1:
            assert by_int.reasons == ["retraced because of pos: int 0 → int 1"]
    assert by_int.trace_count == 300
    by_array = CountedCompile(step)
    for pos in range(300):
        mx.eval(by_array(buffer, mx.array([pos], mx.int32)))
    assert (by_array.trace_count, by_array.reasons) == (1, [])

    FAULTS["position_as_python_int"](monkeypatch)
    assert (
        "traced 16 times in 16 steps, wanted 1: retraced because of pos: int 13 → int 14"
        in red("PAR001", new_subject()).reason
    )


OVERFLOW = """
import sys
from tiny_models import shared_model, state_bytes, tokens
from mlx_audit.decode import CompiledDecodeSession
from mlx_audit.errors import CapacityExceeded

prompt, chunk = int(sys.argv[1]), int(sys.argv[2])
ids = tokens(12)
session = CompiledDecodeSession(shared_model(), 5, evidence="ignore")
if prompt > 5:
    try:
        session.prefill([ids[:prompt]])
    except CapacityExceeded as error:
        print("refused", session.position, error, flush=True)
    sys.exit(0)
session.prefill([ids[:prompt]])
while chunk == 1 and session.remaining:
    session.step([ids[session.position]])
held, before = session.position, state_bytes(session)
for _ in range(20):
    try:
        session.step(ids[:1]) if chunk == 1 else session.extend([ids[:chunk]])
    except CapacityExceeded as error:
        refusal = error
    else:
        sys.exit("not refused")
assert state_bytes(session) == before, "a head, or its neighbour, was written"
assert [arrays[2].item() for arrays in session.state] == [held] * 4
print("refused", session.position, refusal, flush=True)
"""


@pytest.mark.parametrize(
    ("prompt", "chunk", "position"),
    [(3, 1, 5), (5, 1, 5), (6, 1, 0), (3, 3, 3)],
    ids=["step", "full", "prompt", "chunk"],
)
def test_mlx_3917_a_write_outside_the_array_reaches_foreign_memory(
    prompt: int, chunk: int, position: int
) -> None:
    """https://github.com/ml-explore/mlx/pull/3917

    No backend checks the start of an indexed write, so that it must never be dispatched. Tried in another process.
    """
    tests = str(Path(__file__).parents[1])
    run = subprocess.run(
        [sys.executable, "-c", OVERFLOW, str(prompt), str(chunk)],
        env={**os.environ, "PYTHONPATH": tests},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-2000:]
    assert run.stdout.startswith(f"refused {position} ")
    assert "allowed: 5 in all (max_tokens)" in run.stdout


def test_rmlx_238_appends_past_the_bound_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """https://github.com/Pushkinist/rMLX/pull/238

    The buffer was full and each further write was clamped away: fluent, and without the newest tokens.
    """

    def clamping(self: FixedCapacityKVCache, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        last = self.capacity - 1
        start, fits = mx.minimum(self._position, last), self._position <= last
        for name, new in (("keys", keys), ("values", values)):
            buffer = getattr(self, name)
            kept = mx.slice(buffer, start, (2,), new.shape)
            setattr(self, name, mx.slice_update(buffer, mx.where(fits, new, kept), start, axes=(2,)))
        self._position = self._position + 1
        return self.keys, self.values

    monkeypatch.setattr(FixedCapacityKVCache, "update_and_fetch", clamping)
    monkeypatch.setattr(CompiledDecodeSession, "_reserve", lambda self, count, call: None)
    ids = tokens(12)
    session = _session(8)
    session.prefill([ids[:7]])
    before = session.caches
    session.step([ids[7]])
    require_one_slot_written(before, session.caches, "step 0")  # the last slot is still there
    for step, token in enumerate(ids[8:], start=1):
        before = session.caches
        session.step([token])
        with pytest.raises(CheckFailed, match="state unchanged by a step") as found:
            require_one_slot_written(before, session.caches, f"step {step}")
        assert found.value.where == f"step {step}, caches[0]"


def _filled(session: CompiledDecodeSession, value: float) -> CompiledDecodeSession:
    """Return a session whose slots from the position on hold `value`."""
    state = session.state
    for arrays in state:
        for index in (0, 1):
            arrays[index] = mx.array(arrays[index])
            arrays[index][:, :, session.position :, :] = value
    return session.with_state(state)


@pytest.mark.parametrize("trimmed", [0, 3])
def test_vllm_43961_masked_slots_that_hold_nan(trimmed: int) -> None:
    """https://github.com/vllm-project/vllm/pull/43961

    A masked slot is multiplied by zero, and zero times NaN is NaN: quality falls to nothing.
    """
    ids = tokens(8 + trimmed)
    session = _session(32)
    session.prefill([ids[:5]])
    for token in ids[5 : 5 + trimmed]:
        session.step([token])
    assert session.trim(trimmed) == trimmed  # stale rows stay where they are
    require_finite(session.state)
    clean = session.copy()
    wanted = [clean.step([token]) for token in ids[-3:]]
    for value in (1e4, -1e4):
        filled = _filled(session, value)
        assert [
            distance(filled.step([token]), want) for token, want in zip(ids[-3:], wanted, strict=True)
        ] == [0.0] * 3
    poisoned = _filled(session, mx.nan)
    assert np.isnan(np.array(poisoned.step(ids[-3:-2]))).any(), "MLX multiplies masked slots by zero"
    with pytest.raises(CheckFailed, match="masked slots must be finite"):
        require_finite(_filled(session, mx.nan).state)


def test_the_trials_can_fail() -> None:
    """The tiny model sees its history: another third token moves the logits."""
    ids = tokens(9)
    other = [*ids[:2], (ids[2] + 1) % 64, *ids[3:]]
    assert distance(Eager(shared_model()).feed([ids]), Eager(shared_model()).feed([other])) > 0.1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        session = _session(9)
        session.prefill([ids])
        with pytest.raises(CapacityExceeded):
            session.step([0])
