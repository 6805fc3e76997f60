"""CompiledDecodeSession: eager prefill, one compiled step a token, and a host that counts before it dispatches.

Longer than other files here: all of it guards the same three things, the state, the position, and whether the session
is still whole.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, Self

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache

from mlx_audit.adapters import adapter_for
from mlx_audit.adapters.module_state import ModuleState
from mlx_audit.caches import FixedCapacityCache, handle, host_int
from mlx_audit.decode.counted import CountedCompile
from mlx_audit.decode.ladder import rung_for
from mlx_audit.decode.saved import load_state, save_state
from mlx_audit.decode.state import require_count
from mlx_audit.decode.step import DecodeStep, State, run
from mlx_audit.decode.tokens import integers, token_array
from mlx_audit.errors import CapacityExceeded, HostState, SessionBroken, SessionMisuse, ShapeMismatch
from mlx_audit.evidence import require_capable
from mlx_audit.models.positions import require_rows

Sampler = Callable[[mx.array], mx.array]
"""From log-probabilities `[1, vocabulary]` to token ids `[1]`, as mlx-lm's samplers are."""

EXTEND_PIECE = 256
"""Tokens a row that a continuation is fed at once: no more than the audit compares."""

_KEEPS_ALL = ("linear", "quantized")
"""Kinds that have a slot for every token of the text."""

_MOST = 2**31
"""Positions are int32."""


class CompiledDecodeSession:
    """Decodes with a compiled step that carries its position in the graph.

    Args:
        model: An mlx-lm model.
        max_tokens: Capacity in tokens, prompt included.
        batch_size: Rows decoded side by side.
        evidence: `required` refuses a model whose variant has no valid record for this backend; `ignore` is for
            the audit itself and for experiments.
        records: Folder of records to look in first; `$MLX_AUDIT_RECORDS` and the shipped ones come after it.
        prefill_step_size: Tokens a chunk of prefill, as in mlx-lm.

    Raises:
        NotCompileCapable: there is no proof; the message is the command that makes one.
    """

    def __init__(
        self,
        model: nn.Module,
        max_tokens: int = 512,
        batch_size: int = 1,
        *,
        evidence: Literal["required", "ignore"] = "required",
        records: Path | None = None,
        prefill_step_size: int = 2048,
    ) -> None:
        _require_positive(max_tokens=max_tokens, batch_size=batch_size, prefill_step_size=prefill_step_size)
        if evidence not in ("required", "ignore"):
            raise SessionMisuse("unknown evidence", found=evidence, allowed="'required' or 'ignore'")
        if evidence == "required":
            identity = require_capable(model, records=records)
            require_rows(model, identity.arguments, max_tokens)
        self._provider = adapter_for(model, evidence=evidence)
        caches = self._provider.new_fixed_capacity_cache(max_tokens, batch_size=batch_size)
        _require_capacity(caches, max_tokens)
        self.model = model
        self.capacity = max_tokens
        self.batch_size = batch_size
        self._chunk = prefill_step_size
        self._vocabulary = _vocabulary(model)
        self._even = self._step = DecodeStep(model, caches)
        # Slots that a step can attend over; without attention one trace serves every position.
        self._slots = max((cache.slots for cache in caches), default=0)
        self._rungs: dict[tuple[int, bool], CountedCompile] = {}
        self._state: State | None = None
        self._position = 0
        self._calls = 0
        self._warns = evidence == "required"
        self._broken: BaseException | None = None
        # The choice of a step that `generate` has started although its token is not handed out yet.
        self._ahead: mx.array | None = None

    @property
    def position(self) -> int:
        """Tokens in the cache, a row."""
        return self._position

    @property
    def remaining(self) -> int:
        """Tokens that still fit, a row."""
        return self.capacity - self._position

    @property
    def trace_count(self) -> int:
        """Traces of the compiled step since the session was made: one a rung."""
        return sum(compiled.trace_count for compiled in self._rungs.values())

    @property
    def retrace_reasons(self) -> list[str]:
        """What forced each trace after the first, by argument."""
        return [reason for compiled in self._rungs.values() for reason in compiled.reasons]

    @property
    def state(self) -> State:
        """The arrays that the next step will take, one list a cache; handles of the session's own buffers."""
        return [[handle(array) for array in arrays] for arrays in self._require_state("state")]

    def prefill(self, tokens: Any, lengths: Any = None) -> mx.array:
        """Read the prompt eagerly, in chunks, on the model's own caches, and take these over.

        Args:
            tokens: Ids `[B, L]`.
            lengths: How many tokens of each row count, from its first on; all L by default. Rows of different length
                are read one by one, and then decoded side by side, padded on the left: each is what it would be
                alone, and `position` is that of the longest.

        Returns:
            Logits `[B, vocabulary]` after the last token.
        """
        self._require_open()
        if self._position:
            raise SessionMisuse(
                "the session holds tokens already",
                where="prefill",
                found=f"position {self._position}",
                allowed="position 0",
                fix="use extend(tokens), or a new session",
            )
        ids = self._tokens(tokens, None, "prefill")
        counts = self._lengths(lengths, ids.shape[1])
        longest = max(counts)
        self._reserve(longest, "prefill")
        before = ModuleState(self.model)
        try:
            if len(set(counts)) == 1:
                logits, native = self._read_eagerly(ids[:, :longest])
                pairs = zip(self._even.caches, native, strict=True)
                caches = [cache.refilled(own) for cache, own in pairs]
            else:
                logits, caches = self._read_rows(ids, counts)
                native = None
            step = self._even if native is not None else self._padded()
            require_count(caches, longest)
            state = [cache.state for cache in caches]
            del native, caches
            mx.eval(state)
        except BaseException:
            before.restore(code=False)
            raise
        self._step, self._state, self._position = step, state, longest
        return logits

    def _read_eagerly(self, ids: mx.array) -> tuple[mx.array, list[Any]]:
        """Feed `ids` `[B, L]` to the model's own caches; return the logits after the last token, and the caches."""
        native: list[Any] = make_prompt_cache(self.model)
        for start in range(0, ids.shape[1], self._chunk):
            logits = run(self.model, ids[:, start : start + self._chunk], native)
            mx.eval(logits, [cache.state for cache in native])
        return logits, native

    def _read_rows(self, ids: mx.array, counts: list[int]) -> tuple[mx.array, list[FixedCapacityCache]]:
        """Feed the rows one by one, so that none sees another's padding, and merge their caches."""
        rows = [self._read_eagerly(ids[row : row + 1, :count]) for row, count in enumerate(counts)]
        entries = zip(self._even.caches, *(native for _, native in rows), strict=True)
        caches = [cache.merged(natives) for cache, *natives in entries]
        return mx.concatenate([logits for logits, _ in rows]), caches

    def _padded(self) -> DecodeStep:
        """Return the step of a ragged batch; its caches hold no arrays of a session, which could not be donated."""
        return DecodeStep(self.model, [cache.padded() for cache in self._even.caches])

    def _lengths(self, lengths: Any, width: int) -> list[int]:
        if lengths is None:
            return [width] * self.batch_size
        counts = integers(lengths, "prefill(lengths)")
        if len(counts) != self.batch_size or not all(1 <= count <= width for count in counts):
            raise ShapeMismatch(
                "the lengths don't fit the tokens",
                where="prefill(lengths)",
                found=counts,
                allowed=f"{self.batch_size} integers from 1 to {width}",
            )
        return counts

    def step(self, tokens: Any) -> mx.array:
        """Feed one token a row through the compiled step.

        Args:
            tokens: Ids `[B]`.

        Returns:
            Logits `[B, vocabulary]`.

        Raises:
            CapacityExceeded, ShapeMismatch: nothing was dispatched or changed.
            SessionBroken: the evaluation failed after the old buffers were given away.
        """
        state = self._require_state("step")
        ids = self._tokens(tokens, 1, "step")
        self._reserve(1, "step")
        logits: mx.array
        logits, new = self._compiled(1)(self._step.parameters(), state, ids)
        # The old buffers must be let go before evaluation, so that MLX writes into them instead of copying them.
        del state
        self._commit(logits, new, 1)
        self._calls += 1
        if self._warns and self._calls == 3 and self.trace_count == 3 and self.retrace_reasons:
            warnings.warn(
                "the decode step was traced at each of three calls: " + self.retrace_reasons[-1], stacklevel=2
            )
        return logits

    def extend(self, tokens: Any) -> mx.array:
        """Feed several tokens a row, eagerly, on the fixed-capacity caches, in pieces; adds no trace.

        Args:
            tokens: Ids `[B, L]`.

        Returns:
            Logits `[B, vocabulary]` after the last token.
        """
        state = self._require_state("extend")
        ids = self._tokens(tokens, None, "extend")
        self._reserve(ids.shape[1], "extend")
        before = ModuleState(self.model)
        try:
            rung = self._rung(ids.shape[1])
            caches = [
                cache.with_state(arrays, held=self._position).at_rung(rung)
                for cache, arrays in zip(self._step.caches, state, strict=True)
            ]
            for start in range(0, ids.shape[1], EXTEND_PIECE):
                logits = run(self.model, ids[:, start : start + EXTEND_PIECE], caches)
        except BaseException:
            before.restore(code=False)
            raise
        new = [cache.state for cache in caches]
        del state, caches
        self._commit(logits, new, ids.shape[1])
        return logits

    def generate(
        self,
        prompt: Any,
        max_new_tokens: int = 64,
        sampler: Sampler | None = None,
        stop_tokens: Collection[int] = (),
    ) -> Iterator[int]:
        """Yield generated token ids for one prompt; the stop token itself is not yielded.

        Args:
            prompt: Ids `[L]`, continued from where the session stands.
            max_new_tokens: Most tokens to yield. The last one yielded is not fed back, so it needs no slot.
            sampler: As mlx-lm's; greedy by default.
            stop_tokens: Ids that end the text.
        """
        self._require_open()
        if self.batch_size != 1:
            raise SessionMisuse("generate serves one row", found=f"batch_size {self.batch_size}", allowed=1)
        _require_positive(max_new_tokens=max_new_tokens)
        ids = self._tokens([prompt], None, "generate")
        self._reserve(ids.shape[1] + max_new_tokens - 1, "generate")
        stop = frozenset(integers(stop_tokens, "generate(stop_tokens)"))
        return self._generate(ids, max_new_tokens, sampler, stop)

    def trim(self, n: int) -> int:
        """Forget the last `n` tokens and return `n`; return 0 and change nothing where a cache cannot."""
        state = self._require_state("trim")
        (n,) = integers([n], "trim(n)")
        if not 0 < n <= self._position:
            return 0
        caches = self._over(state)
        if any(cache.trim(n) != n for cache in caches):
            return 0
        self._state, self._position = [cache.state for cache in caches], self._position - n
        return n

    def copy(self) -> Self:
        """Return an independent session at the same position; the compiled step is shared, so it costs no trace."""
        self._require_open()
        other = type(self).__new__(type(self))
        other.__dict__.update(self.__dict__)
        other._state = self.state if self._state is not None else None
        return other

    def with_state(self, state: State) -> Self:
        """Return a copy at the same position over other arrays of the same layout; the audit poisons slots with it."""
        layout = [[(a.shape, a.dtype) for a in arrays] for arrays in self._require_state("with_state")]
        given = [[(a.shape, a.dtype) for a in arrays] for arrays in state]
        if given != layout:
            raise ShapeMismatch(
                "the state has another layout", where="with_state", found=given, allowed=layout
            )
        for index, cache in enumerate(self._over(state)):
            held = cache.count()
            if held not in (None, self._position):
                raise ShapeMismatch(
                    "the state stands at another position",
                    where=f"with_state, caches[{index}]",
                    found=held,
                    allowed=self._position,
                )
        other = self.copy()
        other._state = [list(arrays) for arrays in state]
        return other

    @property
    def caches(self) -> list[FixedCapacityCache]:
        """The caches as they are now, as objects of their own over the session's arrays."""
        return self._over(self.state)

    def save(self, path: str | Path) -> None:
        """Write the session's tokens-so-far (caches and position) to one safetensors file, atomically."""
        save_state(Path(path), self._step, self._require_state("save"), self._position)

    @classmethod
    def load(cls, path: str | Path, model: nn.Module, **options: Any) -> Self:
        """Read a saved session for the same model; `options` are those of the constructor but its sizes.

        Raises:
            SavedSessionInvalid: damaged, of another format version, or of another model.
        """
        saved = load_state(Path(path))
        session = cls(model, saved.capacity, saved.batch_size, **options)
        if saved.ragged:
            try:
                session._step = session._padded()
            except ShapeMismatch as error:
                raise saved.invalid("the model cannot hold rows of different length", error, None) from error
        session._state = saved.state_for(session._step)
        session._position = saved.position
        return session

    def _generate(
        self, ids: mx.array, count: int, sampler: Sampler | None, stop_tokens: frozenset[int]
    ) -> Iterator[int]:
        logits = self.extend(ids) if self._position else self.prefill(ids)
        yield from self._follow(_chosen(logits, sampler), count, sampler, stop_tokens)

    def _follow(
        self, choice: mx.array, count: int, sampler: Sampler | None, stop_tokens: frozenset[int]
    ) -> Iterator[int]:
        """Yield `choice` `[1]` and the tokens after it, `count` in all; the last one is not fed."""
        runs_ahead = sampler is None and all(cache.rewinds for cache in self._step.caches)
        try:
            for index in range(count):
                more = index + 1 < count
                following: mx.array | Exception | None = None
                if more and runs_ahead:
                    try:
                        following = self._run_ahead(choice)
                    except Exception as error:  # it belongs to the next token, which may not be wanted
                        following = error
                token = host_int(choice) if self._ahead is None else self._read(choice)
                if token in stop_tokens:
                    return
                yield token
                if isinstance(following, Exception):
                    raise following
                if following is not None and following is self._ahead:
                    self._ahead, choice = None, following
                    self._position += 1
                elif more:
                    choice = _chosen(self.step([token]), sampler)
        finally:
            self._settle()

    def _run_ahead(self, token: mx.array) -> mx.array:
        """Start the step that feeds `token`, which may still be under way, and return its greedy choice, unevaluated.

        The host prepares one step while the device computes the last. Until the token is known not to end the text,
        the session stands before it: `_settle` takes the step back.
        """
        self._reserve(1, "generate")
        state = self._require_state("generate")
        logits, new = self._compiled(1)(self._step.parameters(), state, token)
        following = _chosen(logits, None)
        del state, logits
        self._state = None
        with self._closing():
            mx.async_eval(following, new)
        self._state, self._ahead = new, following
        return following

    def _settle(self) -> None:
        """Take a step back that ran ahead of the tokens handed out."""
        if self._ahead is None or self._state is None:
            return
        self._ahead = None
        with self._closing():
            caches = self._over(self._state)
            for cache in caches:
                cache.trim(1)
            self._state = [cache.state for cache in caches]

    def _read(self, choice: mx.array) -> int:
        with self._closing():
            return host_int(choice)

    @contextmanager
    def _closing(self) -> Iterator[None]:
        """Close the session where an evaluation fails: the buffers that it was to go on with are given away."""
        try:
            yield
        except BaseException as error:
            self._broken, self._state, self._ahead = error, None, None
            if not isinstance(error, Exception):
                raise
            raise SessionBroken(
                "the evaluation failed after the buffers were given away",
                found=error,
                fix="start a new session",
            ) from error

    def _over(self, state: State) -> list[FixedCapacityCache]:
        """Return cache objects over a state; how many tokens they hold is read from their own positions."""
        caches = [cache.with_state(arrays) for cache, arrays in zip(self._step.caches, state, strict=True)]
        for cache in caches:
            cache.count()
        return caches

    def _rung(self, count: int) -> int:
        """Return how many slots the next `count` tokens attend over."""
        return min(rung_for(self._position + count, self.capacity), self._slots)

    def _compiled(self, count: int) -> CountedCompile:
        rung = self._rung(count)
        key = rung, self._step.ragged
        if key not in self._rungs:
            self._rungs[key] = CountedCompile(self._step.at_rung(rung))
        return self._rungs[key]

    def _commit(self, logits: mx.array, state: State, count: int) -> None:
        """Evaluate and take over `state`; the old state is given away here, so a failure ends the session."""
        self._state = None
        with self._closing():
            mx.eval(logits, state)
        self._state = state
        self._position += count

    def _tokens(self, tokens: Any, length: int | None, call: str) -> mx.array:
        return token_array(tokens, shape=(self.batch_size, length), vocabulary=self._vocabulary, call=call)

    def _reserve(self, count: int, call: str) -> None:
        """Refuse `count` more tokens where they don't fit: MLX would write outside the buffer without an error."""
        if count > self.remaining:
            raise CapacityExceeded(
                "the tokens don't fit",
                where=call,
                found=f"{self._position} held and {count} more",
                allowed=f"{self.capacity} in all (max_tokens)",
                fix=f"make the session with max_tokens of {self._position + count} or more",
            )

    def _require_open(self) -> None:
        if self._broken is not None:
            raise SessionBroken("the session is closed", found=self._broken, fix="start a new session")
        self._settle()

    def _require_state(self, call: str) -> State:
        self._require_open()
        if self._state is None:
            raise SessionMisuse("nothing was prefilled yet", where=call, fix="call prefill(tokens) first")
        return self._state


def _chosen(logits: mx.array, sampler: Sampler | None) -> mx.array:
    """Return the next token `[1]`, unevaluated."""
    if sampler is not None:
        return sampler(logits - mx.logsumexp(logits, axis=-1, keepdims=True))
    return mx.view(mx.argmax(logits, -1), mx.int32)


def _require_positive(**sizes: Any) -> None:
    for name, value in sizes.items():
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value < _MOST:
            raise ShapeMismatch(
                "a size is not usable", where=name, found=value, allowed=f"an integer from 1 to {_MOST - 1}"
            )


def _require_capacity(caches: list[FixedCapacityCache], max_tokens: int) -> None:
    """Refuse caches that hold less than was asked for, or nothing: the session would count what is not there."""
    if not any(cache.state for cache in caches):
        raise HostState(
            "the forward writes no cache, so that a step would know nothing of the tokens before it",
            where=f"new_fixed_capacity_cache({max_tokens})",
            found=f"{len(caches)} caches without state",
            allowed="one cache or more that each token is written to",
        )
    for index, cache in enumerate(caches):
        for part in cache.parts:
            short = [
                array.shape[2]
                for array, role in zip(part.state, part.roles, strict=True)
                if role == "buffer" and part.kind in _KEEPS_ALL and array.shape[2] < part.capacity
            ]
            if part.capacity < max_tokens or short:
                raise CapacityExceeded(
                    "the model's own cache is smaller than what was asked for",
                    where=f"new_fixed_capacity_cache({max_tokens})[{index}]",
                    found=f"{min([part.capacity, *short])} tokens",
                    allowed=f"{max_tokens} or more",
                )


def _vocabulary(model: nn.Module) -> int:
    """Return the width of the logits, from two lazy tokens; nothing is evaluated."""
    before = ModuleState(model)
    try:
        return int(model(mx.zeros((1, 2), mx.int32), cache=make_prompt_cache(model)).shape[-1])
    finally:
        before.restore()
