"""The capacity is a promise: full use of it, and not one token more."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from mlx_audit.checks.base import Check, CheckFailed, Figures
from mlx_audit.checks.runs import PROMPT, Comparer, eager_logits, session_for, state_bytes, teacher_tokens
from mlx_audit.checks.subject import Subject
from mlx_audit.decode import CompiledDecodeSession
from mlx_audit.errors import CapacityExceeded, MlxAuditError, SessionMisuse, ShapeMismatch

_ROOM = 5


class FillsToTheLastSlot(Check):
    """The capacity can be used to the last slot.

    What it does:
        Fills a session of 18 tokens with a prompt of 13 and five steps, and one with a prompt alone, and compares the
        logits with eager decoding up to the last slot.

    Why:
        A guard that refuses too early wastes memory; one that counts without the prompt overruns it.

    Example:
        logits differ at step 5, the last slot

    How to fix:
        Count `prompt + generated ≤ max_tokens`.

    Sources:
        ml-explore/mlx-swift-lm#550 (total capacity includes the prompt)
    """

    code = "CAP001"
    tier = "numeric"
    requires = ("PAR001",)
    repeated = False

    def run(self, subject: Subject) -> Figures:
        tokens = teacher_tokens(subject, PROMPT + _ROOM, stream=10)
        wanted = eager_logits(subject.model, tokens[:PROMPT], tokens[PROMPT:])
        session, comparer = session_for(subject, len(tokens)), Comparer(subject.tolerance)
        comparer.check(session.prefill([tokens[:PROMPT]]), wanted[0], "prefill")
        for step, (token, want) in enumerate(zip(tokens[PROMPT:], wanted[1:], strict=True), start=1):
            comparer.check(
                session.step([token]), want, f"step {step} of {_ROOM}, the last of which fills the cache"
            )
        if session.remaining != 0:
            raise CheckFailed(f"{session.remaining} slots remain after {len(tokens)} tokens, wanted 0")
        full = session_for(subject, PROMPT)
        comparer.check(full.prefill([tokens[:PROMPT]]), wanted[0], "a prompt that fills the cache")
        return {**comparer.figures(), "capacity": session.capacity}


class OneMoreIsRefused(Check):
    """One token more is refused before it is dispatched, and nothing changes.

    What it does:
        Asks a full session, and a nearly full one, for more than fits by `step`, `extend`, `prefill` and `generate`.
        Each must raise CapacityExceeded and leave position and state bytes as they were; the nearly full one then takes
        its last tokens.

    Why:
        MLX does not check the range of an indexed write: one slot too many lands in the next head, or outside the
        buffer, and corrupts memory. A graph cannot raise, so the host must count.

    Example:
        step at position 18 of 18 was not refused

    How to fix:
        Check on the host, before the compiled call.

    Sources:
        ml-explore/mlx#3917 (closed: no range check of array-valued slice starts)
    """

    code = "CAP002"
    tier = "numeric"
    requires = ("CAP001",)
    repeated = False

    def run(self, subject: Subject) -> Figures:
        tokens = teacher_tokens(subject, PROMPT + _ROOM, stream=11)
        session = session_for(subject, len(tokens))
        attempts = 0
        _refused(session, lambda: session_for(subject, PROMPT).prefill([tokens]), "prefill", CapacityExceeded)
        session.prefill([tokens[:-2]])
        for count in (3, 4, len(tokens)):
            _refused(
                session, partial(session.extend, [tokens[:count]]), f"extend of {count}", CapacityExceeded
            )
            attempts += 1
        _refused(session, lambda: next(session.generate(tokens[:2], 2)), "generate", CapacityExceeded)
        for token in tokens[-2:]:
            session.step([token])
        for call, attempt in (
            ("step", lambda: session.step([tokens[0]])),
            ("extend", lambda: session.extend([tokens[:1]])),
            ("generate", lambda: next(session.generate(tokens[:1], 1))),
        ):
            for _ in range(3):
                _refused(session, attempt, call, CapacityExceeded)
                attempts += 1
        return {"capacity": session.capacity, "refused": attempts + 2}


class BadTokensRefused(Check):
    """Tokens of a wrong shape, dtype or value are refused, and nothing changes.

    What it does:
        Offers floats, booleans, text, wrong batch sizes, empty and ragged lists, negative ids and ids outside the
        vocabulary to `step` and `extend`; each must raise ShapeMismatch and leave the state as it was.

    Why:
        MLX looks ids up without a range check: a bad id reads foreign memory, and the model goes on.

    Example:
        step([64]) was not refused (vocabulary of 64)

    How to fix:
        Check token ids on the host.

    Sources:
        mlx docs, indexing: out-of-bounds indexing is undefined behaviour
    """

    code = "CAP003"
    tier = "numeric"
    requires = ("PAR001",)
    repeated = False

    def run(self, subject: Subject) -> Figures:
        tokens = teacher_tokens(subject, 5, stream=12)
        session = session_for(subject, 12)
        session.prefill([tokens])
        size = subject.vocabulary
        singles: list[Any] = [
            [size],
            [-1],
            [0.5],
            [True],
            ["a"],
            [],
            [0, 1],
            [[0]],
            0,
            None,
            [2**40],
            np.zeros(1),
        ]
        several: list[Any] = [
            [[0, size]],
            [[0, -1]],
            [[0.5, 1]],
            [[]],
            [0, 1],
            [[0], [1]],
            [[0, 1], [2]],
            "ab",
            None,
        ]
        for bad in singles:
            _refused(session, partial(session.step, bad), f"step({bad!r})", ShapeMismatch)
        for bad in several:
            _refused(session, partial(session.extend, bad), f"extend({bad!r})", ShapeMismatch)
        _refused(session, lambda: session.prefill([tokens]), "a second prefill", SessionMisuse)
        session.step([0])
        return {"refused": len(singles) + len(several) + 1}


def _refused(
    session: CompiledDecodeSession, attempt: Callable[[], Any], call: str, wanted: type[MlxAuditError]
) -> None:
    """Require that an attempt raises `wanted` and leaves the session as it was."""
    before = (session.position, state_bytes(session.state) if session.position else None)
    try:
        attempt()
    except wanted:
        pass
    else:
        raise CheckFailed(
            f"{call} at position {session.position} of {session.capacity} was not refused", where=call
        )
    if before != (session.position, state_bytes(session.state) if session.position else None):
        raise CheckFailed(f"{call} was refused, but changed the session", where=call)
