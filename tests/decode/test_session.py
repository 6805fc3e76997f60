"""CompiledDecodeSession against eager mlx-lm: the same logits, tokens and state, one trace."""

from __future__ import annotations

import gc
import warnings
import weakref
from collections.abc import Sequence

import mlx.core as mx
import pytest
from mlx_lm.generate import generate_step

from mlx_audit.decode import CompiledDecodeSession
from mlx_audit.errors import SessionMisuse
from tiny_models import (
    FAMILIES,
    Eager,
    cold_logits,
    distance,
    raw,
    shared_model,
    state_bytes,
    tiny_model,
    tokens,
)


def new_session(model: object = None, capacity: int = 40, **options: object) -> CompiledDecodeSession:
    return CompiledDecodeSession(model or shared_model(), capacity, evidence="ignore", **options)  # type: ignore[arg-type]


def eager_tokens(model: object, prompt: Sequence[int], count: int, **options: object) -> list[int]:
    steps = generate_step(mx.array(prompt), model, max_tokens=count, **options)  # type: ignore[arg-type]
    return [int(token) for token, _ in steps]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("chunk", [2048, 3])
def test_every_teacher_forced_step_equals_eager_exactly(family: str, chunk: int) -> None:
    model = shared_model(family)
    session, eager = new_session(model, prefill_step_size=chunk), Eager(model)
    ids = tokens(40)
    logits = session.prefill([ids[:7]])
    for start in range(0, 7, chunk):
        wanted = eager.feed([ids[start : min(7, start + chunk)]])
    assert distance(logits, wanted) == 0.0
    for token in ids[7:25]:
        assert distance(session.step([token]), eager.feed([[token]])) == 0.0
    assert distance(session.extend([ids[25:30]]), eager.feed([ids[25:30]])) == 0.0
    for token in ids[30:]:
        assert distance(session.step([token]), eager.feed([[token]])) == 0.0
    assert (session.position, session.remaining, session.capacity) == (40, 0, 40)
    assert session.trace_count == 1
    for (keys, values, position), own in zip(session.state, eager.caches, strict=True):
        assert (raw(keys), raw(values)) == (raw(own.keys[..., :40, :]), raw(own.values[..., :40, :]))
        assert position.tolist() == [40]


def test_logits_do_vary_with_the_tokens() -> None:
    """Guards the tests of this folder: a model blind to its history would pass them all."""
    ids = tokens(12)
    other = [*ids[:3], (ids[3] + 1) % 64, *ids[4:]]
    assert distance(cold_logits(shared_model(), [ids]), cold_logits(shared_model(), [other])) > 0.1
    assert len(set(eager_tokens(shared_model(), ids, 20))) > 3


@pytest.mark.parametrize("length", [1, 2, 9, 10])
def test_prompts_of_every_length(length: int) -> None:
    ids = tokens(10)
    session, eager = new_session(capacity=10), Eager(shared_model())
    assert distance(session.prefill([ids[:length]]), eager.feed([ids[:length]])) == 0.0
    for token in ids[length:]:
        assert distance(session.step([token]), eager.feed([[token]])) == 0.0
    assert session.remaining == 0


def test_rows_of_a_batch_equal_their_solo_runs() -> None:
    left, right = tokens(14, seed=3), tokens(14, seed=4)
    session = new_session(batch_size=2)
    batch = [session.prefill([left[:5], right[:5]])]
    batch += [session.step([a, b]) for a, b in zip(left[5:9], right[5:9], strict=True)]
    batch.append(session.extend([left[9:12], right[9:12]]))
    batch.append(session.step([left[12], right[12]]))
    assert session.trace_count == 1
    for row, ids in enumerate((left, right)):
        solo = new_session()
        alone = [solo.prefill([ids[:5]]), *(solo.step([token]) for token in ids[5:9])]
        alone += [solo.extend([ids[9:12]]), solo.step([ids[12]])]
        # Not 0.0: matrix products of two rows may add up in another order than those of one.
        assert max(distance(b[row : row + 1], a) for b, a in zip(batch, alone, strict=True)) < 1e-4


def test_equal_rows_stay_equal() -> None:
    ids = tokens(9, seed=5)
    session = new_session(batch_size=2)
    session.prefill([ids, ids])
    for token in ids:
        logits = session.step([token, token])
        assert raw(logits[0]) == raw(logits[1])


def test_bfloat16_equals_eager() -> None:
    model, ids = tiny_model(dtype="bfloat16"), tokens(12)
    session, eager = new_session(model), Eager(model)
    assert distance(session.prefill([ids[:4]]), eager.feed([ids[:4]])) == 0.0
    for token in ids[4:]:
        logits, wanted = session.step([token]), eager.feed([[token]])
        assert logits.dtype == mx.bfloat16
        assert distance(logits, wanted) == 0.0
    assert {array.dtype for arrays in session.state for array in arrays[:2]} == {mx.bfloat16}


@pytest.mark.parametrize("family", FAMILIES)
def test_generate_gives_mlx_lm_greedy_tokens(family: str) -> None:
    model, prompt = shared_model(family), tokens(6)
    wanted = eager_tokens(model, prompt, 20)
    session = new_session(model)
    assert list(session.generate(prompt, 20)) == wanted
    # The last token is not fed back, so it took no slot.
    assert (session.position, session.trace_count) == (6 + 19, 1)


@pytest.mark.parametrize("form", [list, tuple, mx.array])
def test_generate_takes_lists_tuples_and_arrays(form: type) -> None:
    prompt = tokens(6)
    assert list(new_session().generate(form(prompt), 4)) == eager_tokens(shared_model(), prompt, 4)


def test_generate_stops_before_a_stop_token_and_goes_on_from_there() -> None:
    prompt = tokens(6)
    wanted = eager_tokens(shared_model(), prompt, 20)
    stop = next(token for index, token in enumerate(wanted) if index > 2 and token not in wanted[:index])
    index = wanted.index(stop)
    session = new_session()
    assert list(session.generate(prompt, 20, stop_tokens=[stop])) == wanted[:index]
    assert session.position == 6 + index  # every yielded token was fed; the stop token was not
    assert list(session.generate([stop], 5)) == wanted[index + 1 : index + 6]


def test_generate_samples_like_mlx_lm_under_one_seed() -> None:
    from mlx_lm.sample_utils import make_sampler

    prompt, sampler = tokens(6), make_sampler(temp=1.0, top_p=0.9)
    mx.random.seed(7)
    wanted = eager_tokens(shared_model(), prompt, 12, sampler=sampler)
    mx.random.seed(7)
    assert list(new_session().generate(prompt, 12, sampler=sampler)) == wanted
    mx.random.seed(8)
    assert list(new_session().generate(prompt, 12, sampler=sampler)) != wanted


def test_generate_left_early_leaves_a_session_that_goes_on() -> None:
    prompt = tokens(6)
    wanted = eager_tokens(shared_model(), prompt, 8)
    session = new_session()
    stream = session.generate(prompt, 8)
    assert [next(stream) for _ in range(3)] == wanted[:3]
    stream.close()
    assert session.position == 8
    assert int(mx.argmax(session.step([wanted[2]]))) == wanted[3]


def test_generate_serves_one_row() -> None:
    with pytest.raises(SessionMisuse, match="one row"):
        new_session(batch_size=2).generate(tokens(3), 2)


def test_trim_forgets_exactly() -> None:
    ids = tokens(20)
    session = new_session()
    session.prefill([ids[:6]])
    for token in ids[6:12]:
        session.step([token])
    assert [session.trim(n) for n in (13, 0, -1)] == [0, 0, 0]
    assert session.trim(5) == 5
    assert (session.position, session.remaining) == (7, 33)
    eager = Eager(shared_model())
    eager.feed([ids[:6]])
    eager.feed([ids[6:7]])
    for token in tokens(8, seed=9):
        assert distance(session.step([token]), eager.feed([[token]])) == 0.0
    assert session.trace_count == 1


def test_after_trimming_everything_a_session_prefills_again() -> None:
    session, ids = new_session(), tokens(6)
    session.prefill([tokens(9, seed=2)])
    assert session.trim(9) == 9
    assert distance(session.prefill([ids]), cold_logits(shared_model(), [ids])) == 0.0


def test_copies_are_independent_both_ways_and_cost_no_trace() -> None:
    ids, left, right = tokens(5), tokens(6, seed=2), tokens(6, seed=3)
    session = new_session()
    session.prefill([ids])
    session.step([1])
    twin = session.copy()
    outcomes = []
    for one, own in ((session, left), (twin, right)):
        eager = Eager(shared_model())
        eager.feed([ids])
        eager.feed([[1]])
        outcomes.append((one, own, eager))
    for index in range(6):  # in turns, so that a shared buffer would show
        for one, own, eager in outcomes:
            assert distance(one.step([own[index]]), eager.feed([[own[index]]])) == 0.0
    assert twin.trim(6) == 6
    assert (session.position, twin.position, session.trace_count) == (12, 6, 1)
    before = state_bytes(session)
    twin.extend([left])
    assert state_bytes(session) == before


def test_second_session_on_the_same_model() -> None:
    ids = tokens(10)
    first, second = new_session(), new_session(capacity=17)
    first.prefill([ids[:3]])
    second.prefill([ids[:5]])
    first_eager, second_eager = Eager(shared_model()), Eager(shared_model())
    first_eager.feed([ids[:3]])
    second_eager.feed([ids[:5]])
    for token in ids[5:]:
        assert distance(first.step([token]), first_eager.feed([[token]])) == 0.0
        assert distance(second.step([token]), second_eager.feed([[token]])) == 0.0
    del first
    gc.collect()
    assert distance(second.step([1]), second_eager.feed([[1]])) == 0.0
    assert second.trace_count == 1


def test_a_dropped_session_frees_model_and_buffers() -> None:
    model = tiny_model()
    session = new_session(model)
    list(session.generate(tokens(4), 6))
    session.extend([[1, 2]])
    twin = session.copy()
    gone = [weakref.ref(model), weakref.ref(session), weakref.ref(twin)]
    del model, session, twin
    gc.collect()
    assert [reference() for reference in gone] == [None] * 3


def test_buffers_are_written_in_place() -> None:
    """At 8 MB a buffer, a copy a step would show at once in the peak."""
    session = new_session(capacity=1 << 17)
    session.prefill([tokens(4)])
    session.step([1])
    buffer = session.state[0][0].nbytes
    assert buffer == 1 << 23
    gc.collect()
    mx.reset_peak_memory()
    base = mx.get_active_memory()
    for token in tokens(3):
        session.step([token])
    # Room for the scores and masks of one attention, which grow with the capacity too.
    assert mx.get_peak_memory() - base < buffer


def test_states_handed_out_are_the_callers_own() -> None:
    session, ids = new_session(), tokens(4)
    session.prefill([ids])
    before = state_bytes(session)
    for arrays in session.state:
        arrays[2] += 3
        arrays[0][:] = 7.0
    assert state_bytes(session) == before
    eager = Eager(shared_model())
    eager.feed([ids])
    assert distance(session.step([5]), eager.feed([[5]])) == 0.0


def test_a_session_that_cannot_compile_says_so() -> None:
    session = new_session()
    session._warns = True  # as with evidence="required", which needs a record
    session.prefill([tokens(3)])
    mx.disable_compile()
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for token in tokens(5):
                session.step([token])
    finally:
        mx.enable_compile()
    assert [str(warning.message) for warning in caught if "switched off" in str(warning.message)]
    assert session.trace_count == 5


def test_a_long_continuation_is_fed_in_pieces_that_the_audit_compares(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from mlx_audit.decode import session as sessions

    own, lengths = sessions.run, list[int]()

    def counted(model: object, ids: mx.array, caches: object) -> mx.array:
        lengths.append(ids.shape[1])
        return own(model, ids, caches)  # type: ignore[arg-type]

    ids = tokens(604)
    session, eager = new_session(capacity=610), Eager(shared_model())
    session.prefill([ids[:3]])
    eager.feed([ids[:3]])
    monkeypatch.setattr(sessions, "run", counted)
    logits = session.extend([ids[3:603]])
    assert lengths == [256, 256, 88]
    for start in (3, 259, 515):
        wanted = eager.feed([ids[start : min(start + 256, 603)]])
    assert distance(logits, wanted) == 0.0
    assert distance(session.step([ids[603]]), eager.feed([[ids[603]]])) == 0.0
