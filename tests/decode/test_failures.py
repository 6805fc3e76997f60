"""A call that fails before evaluation leaves all as it was; one that fails during evaluation ends the session."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest

from mlx_audit.adapters import ModuleState
from mlx_audit.decode import CompiledDecodeSession
from mlx_audit.errors import SessionBroken
from tiny_models import Eager, distance, raw, state_bytes, tiny_model, tokens


class PlantedError(RuntimeError):
    """Raised on purpose by a layer."""


class Failing(nn.Module):
    """A layer that works until the `at`-th call from now, at which it raises once."""

    def __init__(self, layer: nn.Module, at: int, error: type[BaseException] = PlantedError) -> None:
        super().__init__()
        self.inner = layer
        self.seen = 0  # what a failed call counts here is put back by the session
        self.error = error
        self.use_sliding = False
        _calls[id(self)] = at

    def __call__(self, *arguments: Any, **options: Any) -> mx.array:
        _calls[id(self)] -= 1
        self.seen += 1
        if _calls[id(self)] == 0:
            raise self.error("planted")
        return self.inner(*arguments, **options)


_calls: dict[int, int] = {}
"""Outside of the modules, so that nothing resets it."""


def plant(model: Any, at: int, error: type[BaseException] = PlantedError) -> None:
    model.model.layers[2] = Failing(model.model.layers[2], at, error)


def holds_no_tracer(model: nn.Module) -> bool:
    """Return whether every array on a module, private ones too, has a value."""
    found = [
        value
        for _, container, _ in ModuleState(model)._containers
        for value in (container if isinstance(container, list) else container.values())
        if isinstance(value, mx.array)
    ]
    assert len(found) > 20
    mx.eval(found)  # raises for a placeholder
    return True


@pytest.mark.parametrize("error", [PlantedError, KeyboardInterrupt])
def test_failure_in_the_first_compiled_call(error: type[BaseException]) -> None:
    model, ids = tiny_model(), tokens(10)
    session, eager = CompiledDecodeSession(model, 8, evidence="ignore"), Eager(model)
    session.prefill([ids[:4]])
    eager.feed([ids[:4]])
    weights = [raw(array) for array in session._step.parameters()]
    before = state_bytes(session)
    plant(model, 1, error)
    with pytest.raises(error):
        session.step([ids[4]])
    assert (session.position, session.remaining, session.trace_count) == (4, 4, 0)
    assert state_bytes(session) == before
    assert holds_no_tracer(model)
    assert [raw(array) for array in session._step.parameters()] == weights
    assert [float(eager.model(mx.array([[1]]))[0, 0, 0])]  # and eager decoding works
    for token in ids[4:8]:
        assert distance(session.step([token]), eager.feed([[token]])) == 0.0
    assert session.trace_count == 1


def test_failure_of_a_retrace_leaves_the_first_trace_usable() -> None:
    model, ids = tiny_model(), tokens(10)
    session, eager = CompiledDecodeSession(model, 10, evidence="ignore"), Eager(model)
    session.prefill([ids[:4]])
    eager.feed([ids[:4]])
    for token in ids[4:6]:
        session.step([token])
        eager.feed([[token]])
    before, kept = state_bytes(session), model.model.norm.weight
    model.model.norm.weight = kept.astype(mx.bfloat16)  # another dtype needs another trace
    plant(model, 1)
    with pytest.raises(PlantedError):
        session.step([ids[6]])
    model.model.norm.weight = kept
    assert (session.position, session.trace_count, state_bytes(session)) == (6, 1, before)
    assert holds_no_tracer(model)
    model.model.layers[2] = model.model.layers[2].inner
    assert distance(session.step([ids[6]]), eager.feed([[ids[6]]])) == 0.0
    assert session.trace_count == 1


@pytest.mark.parametrize("chunk_of_failure", [1, 2, 3])
def test_failure_in_a_chunk_of_a_prefill(chunk_of_failure: int) -> None:
    model, ids = tiny_model(), tokens(9)
    session = CompiledDecodeSession(model, 12, evidence="ignore", prefill_step_size=3)
    plant(model, chunk_of_failure)
    with pytest.raises(PlantedError):
        session.prefill([ids])
    assert (session.position, session.remaining) == (0, 12)
    assert model.model.layers[2].seen == 0
    assert holds_no_tracer(model)
    eager = Eager(model)
    for start in (0, 3, 6):
        wanted = eager.feed([ids[start : start + 3]])
    assert distance(session.prefill([ids]), wanted) == 0.0
    assert distance(session.step([5]), eager.feed([[5]])) == 0.0


def test_failure_in_an_extension() -> None:
    model, ids = tiny_model(), tokens(9)
    session, eager = CompiledDecodeSession(model, 12, evidence="ignore"), Eager(model)
    session.prefill([ids[:4]])
    eager.feed([ids[:4]])
    before = state_bytes(session)
    plant(model, 1)
    with pytest.raises(PlantedError):
        session.extend([ids[4:]])
    assert (session.position, state_bytes(session)) == (4, before)
    assert model.model.layers[2].seen == 0
    assert holds_no_tracer(model)
    assert distance(session.extend([ids[4:]]), eager.feed([ids[4:]])) == 0.0


def test_failure_in_the_middle_of_generate() -> None:
    model, prompt = tiny_model(), tokens(5)
    wanted = list(CompiledDecodeSession(model, 20, evidence="ignore").generate(prompt, 8))
    session = CompiledDecodeSession(model, 20, evidence="ignore")
    plant(model, 2)  # call 1 is the prefill, call 2 the trace of the first step
    stream, got = session.generate(prompt, 8), []
    with pytest.raises(PlantedError):
        got.extend(stream)
    assert (session.position, got) == (5, wanted[:1])
    assert [next(stream, None)] == [None]
    assert list(session.generate([wanted[0]], 7)) == wanted[1:]


class Memo(nn.Module):
    """A layer that keeps, as real code does, an array that it made in its first call."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.inner = layer
        self.use_sliding = False
        self.scale = None
        self._private = None
        self.by_length: dict[int, mx.array] = {}
        self.rows: list[mx.array] = []
        self._sum = mx.zeros(1)

    def __call__(self, x: mx.array, *arguments: Any, **options: Any) -> mx.array:
        if self.scale is None:
            self.scale = mx.ones(1) * mx.sign(mx.abs(x[0, 0, :1]) + 1)
        if self._private is None:
            self._private = self.scale + 0
        self.by_length.setdefault(x.shape[1], self.scale + 0)
        self.rows.append(self.scale + 0)
        self._sum += mx.abs(x[0, 0, :1]) * 0
        kept = self.scale * self._private * self.by_length[x.shape[1]] * self.rows[-1]
        return self.inner(x * kept, *arguments, **options)


def test_arrays_that_the_forward_keeps_leave_no_placeholder_behind() -> None:
    model, ids = tiny_model(), tokens(10)
    wanted = Eager(tiny_model())
    session = CompiledDecodeSession(model, 12, evidence="ignore")
    model.model.layers[1] = memo = Memo(model.model.layers[1])
    session.prefill([ids[:4]])
    wanted.feed([ids[:4]])
    memo.scale = memo._private = None
    memo.by_length.clear()
    memo.rows.clear()
    for token in ids[4:8]:
        assert distance(session.step([token]), wanted.feed([[token]])) == 0.0
        assert holds_no_tracer(model)
    assert memo.scale is memo._private is None  # as before the trace, and not gone
    assert (memo.by_length, memo.rows, memo._sum.tolist()) == ({}, [], [0])
    assert distance(session.extend([ids[8:]]), wanted.feed([ids[8:]])) == 0.0


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("call", ["step", "extend"])
def test_failure_of_an_evaluation_closes_the_session(
    call: str, error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model()
    session = CompiledDecodeSession(model, 12, evidence="ignore")
    session.prefill([tokens(4)])
    twin = session.copy()
    twin_before = state_bytes(twin)

    def fail(*_: Any) -> None:
        raise error("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(mx, "eval", fail)
        with pytest.raises(SessionBroken if error is RuntimeError else error):
            session.step([1]) if call == "step" else session.extend([[1]])
    assert session.position == 4
    calls: list[Callable[[], Any]] = [
        lambda: session.step([1]),
        lambda: session.extend([[1]]),
        lambda: session.prefill([[1]]),
        lambda: session.trim(1),
        lambda: session.copy(),
        lambda: session.save("never.safetensors"),
        lambda: session.state,
        lambda: session.generate([1], 1),
    ]
    for again in calls:
        with pytest.raises(SessionBroken, match="closed; found: out of memory; fix: start a new session"):
            again()
    # A copy has buffers of its own.
    assert state_bytes(twin) == twin_before
    assert twin.step([1]).shape == (1, 64)


def test_failure_of_the_evaluation_of_a_prefill_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = tiny_model(), tokens(4)
    session = CompiledDecodeSession(model, 12, evidence="ignore")
    real, calls = mx.eval, []

    def fail_at_the_end(*arrays: Any) -> None:
        calls.append(1)
        if len(calls) == 2:
            raise RuntimeError("out of memory")
        real(*arrays)

    with monkeypatch.context() as patch:
        patch.setattr(mx, "eval", fail_at_the_end)
        with pytest.raises(RuntimeError, match="out of memory"):
            session.prefill([ids])
    assert session.position == 0
    assert distance(session.prefill([ids]), Eager(model).feed([ids])) == 0.0
