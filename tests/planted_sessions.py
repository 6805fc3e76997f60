"""Planted faults of steps and sessions, hand-over and files; see `planted`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import KVCache

from mlx_audit.caches import FixedCapacityKVCache as Cache
from mlx_audit.decode import CompiledDecodeSession as Session
from mlx_audit.decode import DecodeStep, run
from mlx_audit.decode import session as sessions
from planted import Patch, fault

_kept: list[Any] = []


# Steps


@fault
def caches_in_another_order(patch: Patch) -> None:
    """The states of the first two layers come out exchanged."""
    own = DecodeStep.__call__

    def call(self: DecodeStep, parameters: Any, state: Any, tokens: Any) -> Any:
        logits, (first, second, *rest) = own(self, parameters, state, tokens)
        return logits, [second, first, *rest]

    patch.setattr(DecodeStep, "__call__", call)


@fault
def parameters_captured(patch: Patch) -> None:
    """The step takes no notice of the parameters that it is given: the trace captures those on the module."""
    own = DecodeStep.__call__

    def call(self: DecodeStep, parameters: Any, state: Any, tokens: Any) -> Any:
        return own(self, [slot.container[slot.key] for slot in self.slots()], state, tokens)

    patch.setattr(DecodeStep, "__call__", call)


@fault
def parameters_copied(patch: Patch) -> None:
    """The step uses copies of the weights that it made when it was built."""
    own, own_init = DecodeStep.__call__, DecodeStep.__init__

    def init(self: DecodeStep, model: Any, caches: Any) -> None:
        own_init(self, model, caches)
        self._copied = [mx.array(array) for array in self.parameters()]  # type: ignore[attr-defined]

    def call(self: DecodeStep, parameters: Any, state: Any, tokens: Any) -> Any:
        return own(self, self._copied, state, tokens)  # type: ignore[attr-defined]

    patch.setattr(DecodeStep, "__init__", init)
    patch.setattr(DecodeStep, "__call__", call)


@fault
def parameters_gathered_once(patch: Patch) -> None:
    """The parameters are those of the first call, for ever."""
    own = DecodeStep.parameters

    def parameters(self: DecodeStep) -> list[mx.array]:
        if not hasattr(self, "_gathered"):
            self._gathered = [mx.array(array) for array in own(self)]  # type: ignore[attr-defined]
        return self._gathered  # type: ignore[attr-defined, no-any-return]

    patch.setattr(DecodeStep, "parameters", parameters)


@fault
def state_comes_out_wider(patch: Patch) -> None:
    """Keys come out as float32, whatever went in."""

    def update_and_fetch(self: Cache, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        self.keys = mx.slice_update(self.keys.astype(mx.float32), keys, self._position, axes=(2,))
        self.values = mx.slice_update(self.values, values, self._position, axes=(2,))
        self._position = self._position + keys.shape[2]
        return self.keys.astype(values.dtype), self.values

    patch.setattr(Cache, "update_and_fetch", update_and_fetch)


@fault
def cache_in_half_precision(patch: Patch) -> None:
    """What is handed over is rounded to bfloat16."""
    own = Cache.adopt.__func__  # type: ignore[attr-defined]

    def adopt(cls: type[Cache], native: Any, max_tokens: int) -> Cache:
        cache = own(cls, native, max_tokens)
        cache.keys = cache.keys.astype(mx.bfloat16).astype(cache.keys.dtype)
        return cache

    patch.setattr(Cache, "adopt", classmethod(adopt))


@fault
def failed_step_leaves_tracers_on_the_module(patch: Patch) -> None:
    """Nothing is put back when the forward raises."""
    from mlx_audit.decode import step as steps

    class Forgetful(steps.ModuleState):
        def restore(self) -> None:
            pass

    patch.setattr(steps, "ModuleState", Forgetful)


@fault
def failed_step_leaves_tracers_in_the_state(patch: Patch) -> None:
    """The step works in the caller's own lists, and leaves its placeholders in them."""

    def call(self: DecodeStep, parameters: Any, state: Any, tokens: Any) -> Any:
        for slot, parameter in zip(self.slots(), parameters, strict=True):
            _kept.append((slot.container, slot.key, slot.container[slot.key]))
            slot.container[slot.key] = parameter
        try:
            caches = [cache.with_state(arrays) for cache, arrays in zip(self.caches, state, strict=True)]
            logits = run(self.model, tokens[:, None], caches)
        finally:
            while _kept:
                container, key, value = _kept.pop()
                container[key] = value
            target = self.session_state if hasattr(self, "session_state") else state
            for arrays, given in zip(target, state, strict=True):
                arrays[:] = given
        return logits, [cache.state for cache in caches]

    own = Session.step

    def step(self: Session, tokens: Any) -> mx.array:
        self._step.session_state = self._state  # type: ignore[attr-defined]
        return own(self, tokens)

    patch.setattr(DecodeStep, "__call__", call)
    patch.setattr(Session, "step", step)


# Sessions


@fault
def position_as_python_int(patch: Patch) -> None:
    """The host's position goes into the compiled call: one trace a token."""
    own = DecodeStep.__call__

    def call(self: DecodeStep, parameters: Any, state: Any, tokens: Any, pos: int | None = None) -> Any:
        return own(self, parameters, state, tokens)

    patch.setattr(DecodeStep, "__call__", call)
    own_step = Session.step

    def step(self: Session, tokens: Any) -> mx.array:
        compiled = self._compiled
        self._compiled = lambda *a: compiled(*a, self._position)  # type: ignore[assignment]
        self._compiled.trace_count = 0  # type: ignore[attr-defined]
        try:
            return own_step(self, tokens)
        finally:
            self._compiled = compiled

    patch.setattr(Session, "step", step)


@fault
def step_counts_two(patch: Patch) -> None:
    """The host counts each token twice."""
    own = Session._commit
    patch.setattr(Session, "_commit", lambda self, logits, state, count: own(self, logits, state, 2 * count))


@fault
def guard_too_early(patch: Patch) -> None:
    """The last slot is never used."""
    own = Session._reserve
    patch.setattr(Session, "_reserve", lambda self, count, call: own(self, count + 1, call))


@fault
def guard_too_late(patch: Patch) -> None:
    """One token more than fits is let through; run it in a process of its own."""
    own = Session._reserve
    patch.setattr(Session, "_reserve", lambda self, count, call: own(self, count - 1, call))


@fault
def capacity_without_the_prompt(patch: Patch) -> None:
    """Only generated tokens are counted; run it in a process of its own."""
    own = Session.prefill

    def prefill(self: Session, tokens: Any, lengths: Any = None) -> mx.array:
        logits = own(self, tokens, lengths)
        self._prompt = self._position  # type: ignore[attr-defined]
        return logits

    def remaining(self: Session) -> int:
        return self.capacity - self._position + int(getattr(self, "_prompt", 0))

    patch.setattr(Session, "prefill", prefill)
    patch.setattr(Session, "remaining", property(remaining))


@fault
def refused_call_counts(patch: Patch) -> None:
    """A refused token moves the position."""
    own = Session._reserve

    def reserve(self: Session, count: int, call: str) -> None:
        try:
            own(self, count, call)
        except BaseException:
            self._position -= 1
            raise

    patch.setattr(Session, "_reserve", reserve)


@fault
def failed_step_advances(patch: Patch) -> None:
    """The position moves before the run has succeeded."""
    own = Session.step

    def step(self: Session, tokens: Any) -> mx.array:
        self._position += 1
        logits = own(self, tokens)
        self._position -= 1
        return logits

    patch.setattr(Session, "step", step)


@fault
def copies_share_everything(patch: Patch) -> None:
    """A copy is the session itself."""
    patch.setattr(Session, "copy", lambda self: self)


@fault
def copies_share_their_list(patch: Patch) -> None:
    """A copy shares the list of states, into which a step puts the new ones."""
    own = Session.copy

    def copy(self: Session) -> Session:
        other = own(self)
        other._state = self._state
        return other

    own_commit = Session._commit

    def commit(self: Session, logits: mx.array, state: Any, count: int) -> None:
        held = self._state
        own_commit(self, logits, state, count)
        if held is not None:
            held[:] = state
            self._state = held

    patch.setattr(Session, "copy", copy)
    patch.setattr(Session, "_commit", commit)


@fault
def trim_lies(patch: Patch) -> None:
    """A cache says that it trimmed, and did not."""
    patch.setattr(Cache, "trim", lambda self, n: n)


@fault
def trim_changes_nothing_but_the_count(patch: Patch) -> None:
    """The session's trim moves nothing and says that it did."""
    patch.setattr(Session, "trim", lambda self, n: n)


@fault
def trim_takes_what_there_is(patch: Patch) -> None:
    """Asked for more than there is, trim takes all."""
    own = Session.trim
    patch.setattr(Session, "trim", lambda self, n: own(self, min(n, self.position)))


@fault
def refused_trim_trims_some_caches(patch: Patch) -> None:
    """Trim is refused, but the first cache has moved."""

    def trim(self: Session, n: int) -> int:
        state = self._require_state("trim")
        state[0][2] = state[0][2] - 1
        return 0

    patch.setattr(Session, "trim", trim)


@fault
def old_states_kept(patch: Patch) -> None:
    """Every state is kept in a list."""
    own, kept = Session._commit, []

    def commit(self: Session, logits: mx.array, state: Any, count: int) -> None:
        kept.append(state)
        own(self, logits, state, count)

    patch.setattr(Session, "_commit", commit)


@fault
def sessions_kept(patch: Patch) -> None:
    """Every session is kept in a list."""
    own, kept = Session.prefill, []

    def prefill(self: Session, tokens: Any, lengths: Any = None) -> mx.array:
        kept.append(self)
        return own(self, tokens, lengths)

    patch.setattr(Session, "prefill", prefill)


# Files and hand-over


@fault
def saved_without_position(patch: Patch) -> None:
    """The file holds zeros where the positions should be."""
    own = sessions.save_state
    patch.setattr(
        sessions,
        "save_state",
        lambda path, step, state, position: own(path, step, [[k, v, p * 0] for k, v, p in state], position),
    )


@fault
def saved_from_the_start(patch: Patch) -> None:
    """Positions are lost in the caches and in the header alike."""
    own = sessions.save_state
    patch.setattr(
        sessions,
        "save_state",
        lambda path, step, state, position: own(path, step, [[k, v, p * 0] for k, v, p in state], 0),
    )


@fault
def saved_in_half_precision(patch: Patch) -> None:
    """Keys go through bfloat16 on their way into the file."""
    own = sessions.save_state

    def save(path: Any, step: Any, state: Any, position: int) -> None:
        own(path, step, [[k.astype(mx.bfloat16).astype(k.dtype), v, p] for k, v, p in state], position)

    patch.setattr(sessions, "save_state", save)


@fault
def handed_over_one_short(patch: Patch) -> None:
    """The native cache lacks the last token."""
    own = Cache.to_native

    def to_native(self: Cache) -> KVCache:
        native = own(self)
        native.offset -= 1
        return native

    patch.setattr(Cache, "to_native", to_native)


@fault
def handed_over_one_late(patch: Patch) -> None:
    """The native cache counts one token too many, so that the next is rotated wrongly and leaves a hole."""
    own = Cache.to_native

    def to_native(self: Cache) -> KVCache:
        native = own(self)
        native.keys = mx.pad(native.keys, [(0, 0), (0, 0), (0, 1), (0, 0)])
        native.values = mx.pad(native.values, [(0, 0), (0, 0), (0, 1), (0, 0)])
        native.offset += 1
        return native

    patch.setattr(Cache, "to_native", to_native)


@fault
def adopted_one_short(patch: Patch) -> None:
    """The position of a cache that was taken over is one too small."""
    own = Cache.adopt.__func__  # type: ignore[attr-defined]

    def adopt(cls: type[Cache], native: Any, max_tokens: int) -> Cache:
        cache = own(cls, native, max_tokens)
        cache._position = cache._position - 1
        return cache

    patch.setattr(Cache, "adopt", classmethod(adopt))


@fault
def native_cache_emptied(patch: Patch) -> None:
    """Taking a native cache over empties it."""
    own = Cache.adopt.__func__  # type: ignore[attr-defined]

    def adopt(cls: type[Cache], native: Any, max_tokens: int) -> Cache:
        cache = own(cls, native, max_tokens)
        native.keys = native.keys * 0
        return cache

    patch.setattr(Cache, "adopt", classmethod(adopt))


@fault
def buffers_shared_with_native(patch: Patch) -> None:
    """A native cache works in the session's own arrays."""

    def to_native(self: Cache) -> KVCache:
        native = KVCache()
        native.keys, native.values, native.offset = self.keys, self.values, int(self._position.item())
        return native

    patch.setattr(Cache, "to_native", to_native)
    patch.setattr(Session, "state", property(lambda self: self._state))


# Tokens and chunks


@fault
def generate_skips_a_token(patch: Patch) -> None:
    """The first generated token is not yielded."""
    own = Session._generate

    def generate(self: Session, *arguments: Any) -> Iterator[int]:
        tokens = own(self, *arguments)
        next(tokens)
        yield from tokens

    patch.setattr(Session, "_generate", generate)


@fault
def generate_takes_the_second_best(patch: Patch) -> None:
    """Greedy decoding is not greedy."""

    def second(logits: mx.array) -> mx.array:
        return mx.argsort(logits, axis=-1)[:, -2]

    own = Session._generate
    patch.setattr(Session, "_generate", lambda self, ids, count, sampler, stop: own(self, ids, count, second, stop))


@fault
def prefill_skips_at_chunk_edges(patch: Patch) -> None:
    """The first token of the second chunk is read twice."""
    own = Session.prefill

    def prefill(self: Session, tokens: Any, lengths: Any = None) -> mx.array:
        (row,) = tokens
        if self._chunk < len(row):
            row = [*row[: self._chunk], row[self._chunk - 1], *row[self._chunk + 1 :]]
        return own(self, [row], lengths)

    patch.setattr(Session, "prefill", prefill)


@fault
def extend_one_by_one_in_reverse(patch: Patch) -> None:
    """A continuation is written in the wrong order."""
    own = Session.extend
    patch.setattr(Session, "extend", lambda self, tokens: own(self, [list(reversed(row)) for row in tokens]))


@fault
def extend_compiles_again(patch: Patch) -> None:
    """A continuation throws the trace away."""
    own = Session.extend

    def extend(self: Session, tokens: Any) -> mx.array:
        logits = own(self, tokens)
        self._compiled._count.traces += 1
        return logits

    patch.setattr(Session, "extend", extend)


@fault
def tokens_not_checked(patch: Patch) -> None:
    """Ids outside the vocabulary are taken modulo its size."""
    own = sessions.token_array

    def lenient(tokens: Any, *, shape: Any, vocabulary: int, call: str) -> mx.array:
        array = mx.array(tokens)
        return own((array % vocabulary).tolist(), shape=shape, vocabulary=vocabulary, call=call)

    patch.setattr(sessions, "token_array", lenient)


@fault
def booleans_are_tokens(patch: Patch) -> None:
    """True counts as token 1."""
    own = sessions.token_array

    def lenient(tokens: Any, **options: Any) -> mx.array:
        return own([1] if tokens == [True] and type(tokens[0]) is bool else tokens, **options)

    patch.setattr(sessions, "token_array", lenient)


@fault
def parameters_replaced_only(patch: Patch) -> None:
    """The parameters are copied whenever one was replaced: changes in place go unseen."""
    own = DecodeStep.parameters

    def parameters(self: DecodeStep) -> list[mx.array]:
        now = own(self)
        seen = getattr(self, "_seen", ())
        if len(now) != len(seen) or any(a is not b for a, b in zip(now, seen, strict=True)):
            self._seen, self._gathered = now, [mx.array(array) for array in now]  # type: ignore[attr-defined]
        return self._gathered  # type: ignore[attr-defined, no-any-return]

    patch.setattr(DecodeStep, "parameters", parameters)
