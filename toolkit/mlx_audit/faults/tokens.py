"""What a session may make of tokens, one or many."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import mlx.core as mx

from mlx_audit.decode import CompiledDecodeSession as Session
from mlx_audit.decode import session as sessions
from mlx_audit.faults.base import Patch, fault


@fault("PAR002")
def generate_skips_a_token(patch: Patch) -> None:
    """The first generated token is not yielded."""
    own = Session._generate

    def generate(self: Session, *arguments: Any) -> Iterator[int]:
        tokens = own(self, *arguments)
        next(tokens)
        yield from tokens

    patch.setattr(Session, "_generate", generate)


@fault("PAR002")
def generate_takes_the_second_best(patch: Patch) -> None:
    """Greedy decoding is not greedy."""

    def second(logits: mx.array) -> mx.array:
        return mx.argsort(logits, axis=-1)[:, -2]

    own = Session._generate
    patch.setattr(
        Session, "_generate", lambda self, ids, count, sampler, stop: own(self, ids, count, second, stop)
    )


@fault("PAR004")
def prefill_skips_at_chunk_edges(patch: Patch) -> None:
    """The first token of the last chunk is not read; the one before it is read twice."""
    own = Session.prefill

    def prefill(self: Session, tokens: Any, lengths: Any = None) -> mx.array:
        (row,) = tokens
        if edge := (len(row) - 1) // self._chunk * self._chunk:
            row = [*row[:edge], row[edge - 1], *row[edge + 1 :]]
        return own(self, [row], lengths)

    patch.setattr(Session, "prefill", prefill)


@fault("PAR003")
def extend_one_by_one_in_reverse(patch: Patch) -> None:
    """A continuation is written in the wrong order."""
    own = Session.extend
    patch.setattr(Session, "extend", lambda self, tokens: own(self, [list(reversed(row)) for row in tokens]))


@fault("PAR003")
def extend_compiles_again(patch: Patch) -> None:
    """A continuation throws the trace away."""
    own = Session.extend

    def extend(self: Session, tokens: Any) -> mx.array:
        logits = own(self, tokens)
        self._compiled(1)._count.traces += 1
        return logits

    patch.setattr(Session, "extend", extend)


@fault("CAP003")
def tokens_not_checked(patch: Patch) -> None:
    """Ids outside the vocabulary are taken modulo its size."""
    own = sessions.token_array

    def lenient(tokens: Any, *, shape: Any, vocabulary: int, call: str) -> mx.array:
        array = mx.array(tokens)
        return own((array % vocabulary).tolist(), shape=shape, vocabulary=vocabulary, call=call)

    patch.setattr(sessions, "token_array", lenient)


@fault("CAP003")
def booleans_are_tokens(patch: Patch) -> None:
    """True counts as token 1."""
    own = sessions.token_array

    def lenient(tokens: Any, **options: Any) -> mx.array:
        return own([1] if tokens == [True] and type(tokens[0]) is bool else tokens, **options)

    patch.setattr(sessions, "token_array", lenient)
