"""Operations played on a session, beside eager decoding that has read only the tokens that are held."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_audit.checks.base import CheckFailed
from mlx_audit.checks.compared import compare_states
from mlx_audit.checks.failing import failing, middle_layer, must_fail
from mlx_audit.checks.operations import CHUNK, WIDER, Player, require_refused
from mlx_audit.checks.parts import capacity_for, specs_of
from mlx_audit.checks.runs import Comparer, Eager, session_for, state_bytes, teacher_tokens
from mlx_audit.checks.subject import Subject
from mlx_audit.decode import CompiledDecodeSession
from mlx_audit.errors import MlxAuditError


class Bench:
    """What the sessions of all sequences share: compiled steps, tokens, and the comparison.

    Attributes:
        bases: Empty sessions of two capacities; copies of one share its trace.
        failing: An empty session that is never traced, so that a layer runs in its step, and can raise.
    """

    def __init__(self, subject: Subject) -> None:
        self.subject, self.model = _relaxed(subject), subject.model
        self.comparer = Comparer(self.subject.tolerance)
        specs = specs_of(subject)
        # In a chunk mlx-lm hides what a ring keeps, and shows it to single tokens; ours shows it to both.
        self.one_by_one = any(spec.keep for spec in specs)
        sizes = (capacity_for(specs), capacity_for(specs) + WIDER)
        self.bases = [session_for(subject, size, prefill_step_size=CHUNK) for size in sizes]
        self.failing = [session_for(subject, size, prefill_step_size=CHUNK) for size in sizes]
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


class SessionPlayer(Player):
    """A session of the tiny model, beside eager decoding on the tokens that are held."""

    def __init__(self, bench: Bench) -> None:
        super().__init__()
        self._bench = bench
        self._supply: Iterator[int] = iter(bench.tokens)
        self._branches: list[_Branch] = []

    @property
    def _now(self) -> _Branch:
        return self._branches[self.current]

    @property
    def _room(self) -> int:
        """Tokens that must still fit."""
        return self._now.session.capacity - len(self._now.read)

    def _new(self, count: int) -> list[int]:
        return list(islice(self._supply, count))

    def duplicate(self) -> None:
        self._branches.append(_Branch(self._now.session.copy(), self._now.read.without(0)))

    def prefill(self, tokens: int) -> None:
        session, read = self._bench.bases[0].copy(), _Read(self._bench.model, [])
        prompt = self._new(tokens)
        got = session.prefill([prompt])
        for start in range(0, tokens, CHUNK):
            want = read.feed(prompt[start : start + CHUNK])
        self._branches = [_Branch(session, read)]
        self._compare(got, want, "prefill")

    def step(self, _: int) -> None:
        if self._room:
            token = self._new(1)
            self._compare(self._now.session.step(token), self._now.read.feed(token), "step")

    def extend(self, tokens: int) -> None:
        piece = self._new(min(tokens, self._room))
        if piece:
            for part in [[token] for token in piece] if self._bench.one_by_one else [piece]:
                want = self._now.read.feed(part)
            self._compare(self._now.session.extend([piece]), want, "extend")

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
            options: dict[str, Any] = {"evidence": "ignore", "prefill_step_size": CHUNK}
            try:
                self._now.session = CompiledDecodeSession.load(path, self._bench.model, **options)
            except MlxAuditError as error:
                error.where = path.name  # the folder is another one at every run
                raise
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
        many = self._new(self._room + 1)
        require_refused(lambda: session.extend([many]), "extend by one token too many")
        self._require_unchanged(before, "a refused call")
        # Only now: a step that is let through in a full session would write outside the buffers.
        if len(many) == 1:
            require_refused(lambda: session.step(many), "a step of a full session")
            self._require_unchanged(before, "a refused step")

    def fail(self, _: int) -> None:
        branch, bench = self._now, self._bench
        if not self._room:
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
        for _ in self.each():
            branch, label = self._now, f"the end of copy {self.current}" if self.current else "the end"
            session, held = branch.session, len(branch.read)
            if (session.position, session.remaining) != (held, session.capacity - held):
                raise CheckFailed(
                    f"{session.position} tokens held and room for {session.remaining} at {label}, wanted {held} and "
                    f"{session.capacity - held}"
                )
            compare_states(self._bench.subject, session, branch.read.eager.cache, label)
        for _ in self.each():
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


def _relaxed(subject: Subject) -> Subject:
    """Return the subject with a tolerance for chunks of other lengths: a text that was trimmed is read in such."""
    return subject if subject.exactness_class == "kernel" else replace(subject, exactness="reordered")
