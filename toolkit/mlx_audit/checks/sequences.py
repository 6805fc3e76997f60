"""Any order of operations: what only one order of several calls shows, each of which is right by itself."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_audit.checks.base import Check, CheckFailed, Figures
from mlx_audit.checks.compared import compare_states
from mlx_audit.checks.failing import failing, middle_layer, must_fail
from mlx_audit.checks.numbered import NumberedText, require_right
from mlx_audit.checks.operations import Operation, Player, drawn, known, play, play_shortest
from mlx_audit.checks.parts import Part, capacity_for, rings_of, slotted_kinds, specs_of
from mlx_audit.checks.properties import require_always
from mlx_audit.checks.runs import Comparer, Eager, session_for, state_bytes, teacher_tokens
from mlx_audit.checks.subject import Subject
from mlx_audit.decode import CompiledDecodeSession
from mlx_audit.errors import CapacityExceeded

_CHUNK = 5
"""Tokens a chunk of a prompt: it goes across the usual small window."""

_WINDOW = 6
"""What stands for a window where nothing is forgotten."""

_WIDER = 7
"""By how many tokens two capacities differ, between which a text goes to and fro."""


class AnyOrder(Check):
    """After any order of operations, each cache holds exactly the tokens of its text.

    What it does:
        Plays sequences of operations, three that are always the same and others that are drawn: a prompt in chunks,
        steps, several tokens at once, trims (which may be refused), copies that go on side by side, a way through a
        file, a hand-over to native caches that read on and are adopted at another capacity, one token more than fits,
        and a layer that raises. First each kind of cache alone, beside a list of numbered tokens: each new token must
        see exactly those that the cache's parameters ask for. Then a session, beside eager decoding that has read only
        the tokens that are held: logits after each call, and at the end every cache of every copy. Calls that are
        refused or fail must change nothing. A sequence that fails is made shorter until nothing can be left out.

    Why:
        Each call may be right by itself and leave behind what the next one stumbles over: a slot that a trim only
        hides, a buffer that copies share until one is trimmed, a ring that is adopted as if it had not turned.

    Example:
        prefill 6; trim 1; extend 2: rotating of 8: at position 5 the mask of query 0 (window None) shows tokens
        [0, 1, 2, 3, 4, 'forgotten', 5], wanted [0, 1, 2, 3, 4, 5]

    How to fix:
        Play the shortest sequence by hand, and look at the state after each of its operations.

    Sources:
        ml-explore/mlx-lm#1776 (a trim after the ring had turned); hypothesis.readthedocs.io, stateful tests
    """

    code = "STA006"
    tier = "numeric"
    requires = ("STA002", "STA003", "STA004", "STA005", "LIF001")
    repeated = False

    def run(self, subject: Subject) -> Figures:
        parts, tally = slotted_kinds(subject), {"sequences": 0}
        for part in parts:
            _require_any_order(subject, partial(_CachePlayer, part), part.spec.ring or _WINDOW, tally)
        comparer = Comparer(_relaxed(subject).tolerance)
        rings = rings_of(specs_of(subject))
        new_player = partial(_SessionPlayer, _Bench(subject, comparer))
        _require_any_order(subject, new_player, rings[0] if rings else _WINDOW, tally)
        return {**tally, "caches": [part.spec.label for part in parts], **comparer.figures()}


def _require_any_order(
    subject: Subject, new_player: Callable[[], Player], window: int, tally: dict[str, int]
) -> None:
    """Play known and drawn sequences, each on a new player."""
    for operations in known(window):
        play_shortest(new_player, operations)
        tally["sequences"] += 1

    def example(operations: list[Operation]) -> None:
        play(new_player(), operations)
        tally["sequences"] += 1

    require_always(subject, {"operations": drawn(window)}, example, share=2)


def _relaxed(subject: Subject) -> Subject:
    """Return the subject with a tolerance for chunks of other lengths: a text that was trimmed is read in such."""
    return subject if subject.exactness_class == "kernel" else replace(subject, exactness="reordered")


@dataclass
class _Numbered:
    """A cache and the text that it must hold."""

    cache: Any
    text: NumberedText


class _CachePlayer(Player):
    """One cache of a kind, beside a list of numbered tokens."""

    def __init__(self, part: Part) -> None:
        super().__init__()
        self._kind, self._spec = type(part.cache), part.spec
        self._capacity = capacity_for([part.spec])
        self._held: list[_Numbered] = []

    @property
    def _now(self) -> _Numbered:
        return self._held[self.current]

    def duplicate(self) -> None:
        self._held.append(_Numbered(self._now.cache.copy(), self._now.text.copy()))

    def prefill(self, tokens: int) -> None:
        text, native = NumberedText(self._spec), self._spec.new_native()
        for start in range(0, tokens, _CHUNK):
            self._read(native, text, min(_CHUNK, tokens - start))
        self._held = [_Numbered(self._kind.adopt(native, self._capacity), text)]

    def _read(self, native: Any, text: NumberedText, tokens: int) -> None:
        if self._spec.kind == "chunked":
            native.maybe_trim_front()
        native.update_and_fetch(*text.more(tokens))

    def step(self, _: int) -> None:
        """Write one token as a compiled step does: the host doesn't tell the cache how many it holds."""
        self._now.cache = self._now.cache.with_state(self._now.cache.state)
        self.extend(1)

    def extend(self, tokens: int) -> None:
        cache, held = self._now.cache, len(self._now.text.tokens)
        tokens = min(tokens, cache.capacity - held)
        if tokens:
            self._now.cache = cache.at_rung(held + tokens)
            require_right(self._now.cache, self._now.text, tokens, narrow=2)

    def trim(self, tokens: int) -> None:
        cache, text = self._now.cache, self._now.text
        held, before = len(text.tokens), state_bytes([cache.state])
        if tokens >= held:
            return
        wanted = tokens if self._spec.forgets(held, tokens) else 0
        if (got := cache.trim(tokens)) != wanted:
            raise CheckFailed(f"{text.label}: trim({tokens}) of {held} returned {got}, wanted {wanted}")
        del text.tokens[held - got :]
        if not got:
            self._require_unchanged(before, "a refused trim")

    def reload(self, _: int) -> None:
        cache = self._now.cache
        with tempfile.TemporaryDirectory(prefix="mlx-audit-") as folder:
            path = str(Path(folder) / "state.safetensors")
            mx.save_safetensors(path, {str(index): array for index, array in enumerate(cache.state)})
            arrays: Any = mx.load(path)
            mx.eval(arrays)
        blank = cache.with_state([mx.zeros_like(array) for array in cache.state])
        self._now.cache = blank.with_state([arrays[str(index)] for index in range(len(cache.state))])
        self._now.cache.require_sound()

    def hand_over(self, tokens: int) -> None:
        cache, text = self._now.cache, self._now.text
        capacity = self._capacity + _WIDER * (cache.capacity == self._capacity)
        tokens = min(tokens, capacity - len(text.tokens))
        if tokens >= 0:
            native = cache.to_native()
            if tokens:
                self._read(native, text, tokens)
            self._now.cache = self._kind.adopt(native, capacity)

    def overflow(self, _: int) -> None:
        cache, text = self._now.cache, self._now.text
        before, held = state_bytes([cache.state]), cache.count()
        keys, values = text.copy().more(cache.capacity - held + 1)
        _require_refused(lambda: cache.update_and_fetch(keys, values), f"{text.label}: one token too many")
        self._require_unchanged(before, "a refused token")

    def fail(self, _: int) -> None:
        """A cache alone has no layers."""

    def finish(self) -> None:
        for self.current in range(self.copies):
            cache, held = self._now.cache, len(self._now.text.tokens)
            if cache.count() != held:
                raise CheckFailed(f"{self._spec.label} stands at {cache.count()}, wanted {held}")
            self.extend(1)

    def _require_unchanged(self, before: list[bytes], label: str) -> None:
        if state_bytes([self._now.cache.state]) != before:
            raise CheckFailed(f"{self._spec.label}: {label} changed the state")


class _Bench:
    """What the sessions of all sequences share: compiled steps, tokens, and the comparison.

    Attributes:
        bases: Empty sessions of two capacities; copies of one share its trace.
        failing: An empty session that is never traced, so that a layer runs in its step, and can raise.
    """

    def __init__(self, subject: Subject, comparer: Comparer) -> None:
        self.subject, self.comparer = _relaxed(subject), comparer
        capacity = capacity_for(specs_of(subject))
        sizes = (capacity, capacity + _WIDER)
        self.model = subject.model
        self.bases = [session_for(subject, size, prefill_step_size=_CHUNK) for size in sizes]
        self.failing = [session_for(subject, size, prefill_step_size=_CHUNK) for size in sizes]
        self.tokens = teacher_tokens(subject, 4096, stream=21)


class _Read:
    """The tokens that a session must hold, in the pieces that they came in, and eager decoding that has read them."""

    def __init__(self, model: nn.Module, pieces: list[list[int]]) -> None:
        self._model, self._pieces = model, pieces
        self._eager: Eager | None = None

    @property
    def eager(self) -> Eager:
        """Eager decoding that has read these tokens and no others."""
        if self._eager is None:
            self._eager = Eager(self._model)
            for piece in self._pieces:
                self._eager.feed(piece)
        return self._eager

    def __len__(self) -> int:
        return sum(map(len, self._pieces))

    def feed(self, tokens: list[int]) -> mx.array:
        """Read more and return the logits after the last."""
        logits = self.eager.feed(tokens)
        self._pieces.append(tokens)
        return logits

    def without(self, count: int) -> _Read:
        """Return the text without its last tokens; nothing was read of it yet."""
        pieces = [list(piece) for piece in self._pieces]
        for _ in range(count):
            pieces[-1].pop()
            if not pieces[-1]:
                pieces.pop()
        return _Read(self._model, pieces)


@dataclass
class _Branch:
    """A session and what it must hold."""

    session: CompiledDecodeSession
    read: _Read


class _SessionPlayer(Player):
    """A session of the tiny model, beside eager decoding on the tokens that are held."""

    def __init__(self, bench: _Bench) -> None:
        super().__init__()
        self._bench, self._wide = bench, 0
        self._supply: Iterator[int] = iter(bench.tokens)
        self._branches: list[_Branch] = []

    @property
    def _now(self) -> _Branch:
        return self._branches[self.current]

    def _new(self, count: int) -> list[int]:
        return list(islice(self._supply, count))

    def duplicate(self) -> None:
        self._branches.append(_Branch(self._now.session.copy(), self._now.read.without(0)))

    def prefill(self, tokens: int) -> None:
        session, read = self._bench.bases[0].copy(), _Read(self._bench.model, [])
        prompt = self._new(tokens)
        got = session.prefill([prompt])
        for start in range(0, tokens, _CHUNK):
            want = read.feed(prompt[start : start + _CHUNK])
        self._branches = [_Branch(session, read)]
        self._compare(got, want, "prefill")

    def step(self, _: int) -> None:
        if self._now.session.remaining:
            token = self._new(1)
            self._compare(self._now.session.step(token), self._now.read.feed(token), "step")

    def extend(self, tokens: int) -> None:
        piece = self._new(min(tokens, self._now.session.remaining))
        if piece:
            self._compare(self._now.session.extend([piece]), self._now.read.feed(piece), "extend")

    def trim(self, tokens: int) -> None:
        session = self._now.session
        if tokens >= session.position:
            return
        before = self._standing()
        got = session.trim(tokens)
        if got not in (0, tokens):
            raise CheckFailed(f"trim({tokens}) returned {got}, wanted {tokens} or 0")
        if got:
            self._now.read = self._now.read.without(got)
        else:
            self._require_unchanged(before, "a refused trim")

    def reload(self, _: int) -> None:
        before = self._standing()
        with tempfile.TemporaryDirectory(prefix="mlx-audit-") as folder:
            path = Path(folder) / "session.safetensors"
            self._now.session.save(path)
            options: dict[str, Any] = {"evidence": "ignore", "prefill_step_size": _CHUNK}
            self._now.session = CompiledDecodeSession.load(path, self._bench.model, **options)
        self._require_unchanged(before, "the way through a file")

    def hand_over(self, tokens: int) -> None:
        branch = self._now
        base = self._bench.bases[branch.session.capacity == self._bench.bases[0].capacity]
        held = branch.session.position
        if held > base.capacity:
            return
        eager = Eager(self._bench.model, cache=[cache.to_native() for cache in branch.session.caches])
        if piece := self._new(min(tokens, base.capacity - held)):
            self._compare(eager.feed(piece), branch.read.feed(piece), "eager decoding after a hand-over")
        taker = _at(base, held + len(piece))
        pairs = zip(taker.caches, eager.cache, strict=True)
        branch.session = taker.with_state([cache.refilled(native).state for cache, native in pairs])

    def overflow(self, _: int) -> None:
        session, before = self._now.session, self._standing()
        many = self._new(session.remaining + 1)
        _require_refused(lambda: session.extend([many]), "extend by one token too many")
        if not session.remaining:
            _require_refused(lambda: session.step(many), "a step of a full session")
        self._require_unchanged(before, "a refused call")

    def fail(self, _: int) -> None:
        branch, bench = self._now, self._bench
        if not branch.session.remaining:
            return
        before, token = self._standing(), self._new(1)
        wide = branch.session.capacity != bench.bases[0].capacity
        state, position = branch.session.state, branch.session.position
        branch.session = _at(bench.failing[wide], position).with_state(state)
        with failing(middle_layer(bench.model)):
            must_fail(lambda: branch.session.step(token), "a step")
        self._require_unchanged(before, "a failed step")
        branch.session = _at(bench.bases[wide], position).with_state(branch.session.state)
        with failing(middle_layer(bench.model)):
            must_fail(lambda: branch.session.extend([token]), "extend")
        self._require_unchanged(before, "a failed extend")

    def finish(self) -> None:
        for self.current, branch in enumerate(self._branches):
            label = f"the end of copy {self.current}" if self.current else "the end"
            if branch.session.position != len(branch.read):
                raise CheckFailed(f"position {branch.session.position} at {label}, wanted {len(branch.read)}")
            compare_states(self._bench.subject, branch.session, branch.read.eager.cache, label)
        for self.current in range(self.copies):
            self.step(0)

    def _standing(self) -> tuple[int, list[bytes]]:
        return self._now.session.position, state_bytes(self._now.session.state)

    def _require_unchanged(self, before: tuple[int, list[bytes]], label: str) -> None:
        position, state = self._standing()
        if position != before[0]:
            raise CheckFailed(f"{label} moved the position to {position}, wanted {before[0]}")
        if state != before[1]:
            raise CheckFailed(f"{label} changed the state")

    def _compare(self, got: mx.array, want: mx.array, label: str) -> None:
        self._bench.comparer.check(got, want, f"{label} to position {len(self._now.read)}")


def _at(base: CompiledDecodeSession, position: int) -> CompiledDecodeSession:
    """Return a copy of an empty session that stands at a position; what it holds is to be replaced."""
    session = base.copy()
    session.prefill([[0] * position])
    return session


def _require_refused(call: Callable[[], object], label: str) -> None:
    try:
        call()
    except CapacityExceeded:
        return
    raise CheckFailed(f"{label} was not refused")
