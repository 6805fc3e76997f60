"""Does a session survive leaving its process, and do caches change hands without loss?"""

from __future__ import annotations

import tempfile
from functools import partial
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from mlx_audit.checks.base import Check, CheckFailed, Figures
from mlx_audit.checks.parts import rings_of, specs_of
from mlx_audit.checks.properties import require_always
from mlx_audit.checks.runs import (
    PROMPT,
    Comparer,
    Eager,
    same_bytes,
    session_for,
    state_bytes,
    teacher_tokens,
)
from mlx_audit.checks.scenario import Scenario, during
from mlx_audit.checks.subject import Subject
from mlx_audit.decode import CompiledDecodeSession

_FURTHER = 8
"""Tokens after a hand-over."""

_SHORT = 4
"""Of them, tokens in sessions of other capacities: enough for a ring to write over what was handed to it."""


class SaveAndLoad(Check):
    """A saved session continues as if it had not been saved.

    What it does:
        Saves after some steps, loads with the same model, compares state bytes and position, and continues both.

    Why:
        A state that loses its position, or a dtype, goes on fluently from the wrong place.

    Example:
        the loaded state differs from the saved one

    How to fix:
        Put every array of `state` into the file, positions included.

    Sources:
        safetensors format
    """

    code = "STA004"
    tier = "numeric"
    requires = ("STA001", "MSK002")
    repeated = False

    def run(self, subject: Subject) -> Figures:
        tokens = teacher_tokens(subject, PROMPT + 4, stream=7)
        session = session_for(subject, PROMPT + 4)
        session.prefill([tokens[:PROMPT]])
        session.step([tokens[PROMPT]])
        with tempfile.TemporaryDirectory(prefix="mlx-audit-") as folder:
            path = Path(folder) / "session.safetensors"
            session.save(path)
            loaded = CompiledDecodeSession.load(path, subject.model, evidence="ignore")
            size = path.stat().st_size
            if not same_bytes(loaded.state, session.state) or loaded.position != session.position:
                raise CheckFailed("the loaded state differs from the saved one")
            comparer = Comparer(subject.tolerance)
            for step, token in enumerate(tokens[PROMPT + 1 :], start=1):
                comparer.check(loaded.step([token]), session.step([token]), f"step {step} after load")
        return {**comparer.figures(), "file_bytes": size}


class HandOff(Check):
    """Caches are handed over from and to the model's own without loss.

    What it does:
        At drawn points of a text (always just before, at and just after a ring turns) turns the session's caches into
        native ones and continues eagerly, hands eager decoding's own to a session and continues compiled, and hands the
        session's to a session of another capacity. They must go on for eight tokens, in other capacities for four, as
        eager decoding that never left does.

    Why:
        Prefill is eager, and a server may fall back to eager decoding in the middle of a text. A shift of all
        positions, invisible inside one kind of cache, shows when caches change hands; so does a ring whose oldest
        token is taken for its latest.

    Example:
        logits differ at eager step 1 after compiled decoding (prompt 8, 1 steps)

    How to fix:
        Look at `adopt` and `to_native`: position, slots, and the length of what is handed over.

    Sources:
        mlx_lm/models/cache.py KVCache.state
    """

    code = "STA005"
    tier = "numeric"
    requires = ("STA001", "STA002")
    repeated = False

    def run(self, subject: Subject) -> Figures:
        rings = rings_of(specs_of(subject))
        longest = max([PROMPT, *(2 * ring for ring in rings)])
        capacity = longest + 3 + _FURTHER
        base, comparer = session_for(subject, capacity), Comparer(subject.tolerance)
        # The smallest ring does not turn in a session of its own size.
        others = [session_for(subject, size) for size in [capacity + 9, *rings[:1]]]
        points = [ring + near for ring in rings for near in (-1, 0, 1)] or [PROMPT + 3]
        always = [{"prompt": max(1, point - 3), "steps": min(3, point - 1)} for point in points]
        strategy = {"prompt": st.integers(1, longest), "steps": st.integers(0, 3)}
        example = partial(self._example, subject, base, others, comparer)
        require_always(subject, strategy, example, always=always, share=6)
        return {**comparer.figures(), "capacities": [base.capacity, *(other.capacity for other in others)]}

    @staticmethod
    def _example(
        subject: Subject,
        base: CompiledDecodeSession,
        others: list[CompiledDecodeSession],
        comparer: Comparer,
        prompt: int,
        steps: int,
    ) -> None:
        tokens = teacher_tokens(subject, prompt + steps + _FURTHER, stream=8)
        session, eager = base.copy(), Eager(subject.model)
        session.prefill([tokens[:prompt]])
        eager.feed(tokens[:prompt])
        for token in tokens[prompt : prompt + steps]:
            session.step([token])
            eager.feed([token])
        before = state_bytes(session.state)
        handed = Eager(subject.model, cache=_natives(session))
        adopted = [_adopting(base, eager.cache, session.position)]
        adopted += [
            _adopting(other, _natives(session), session.position)
            for other in others
            if other.capacity > session.position
        ]
        for step, token in enumerate(tokens[prompt + steps :], start=1):
            where, want = f"(prompt {prompt}, {steps} steps)", eager.feed([token])
            with during(Scenario(prompt, steps + _FURTHER, base.capacity, stream=8, dtype=subject.dtype)):
                comparer.check(
                    handed.feed([token]), want, f"eager step {step} after compiled decoding {where}"
                )
                for taker in [one for one in adopted if one.remaining][: 1 if step > _SHORT else None]:
                    label = f"compiled step {step} after eager decoding, capacity {taker.capacity} {where}"
                    comparer.check(taker.step([token]), want, label)
        if state_bytes(session.state) != before:
            raise CheckFailed("eager decoding on the caches that were handed over changed the session's own")


def _natives(session: CompiledDecodeSession) -> list[Any]:
    return [cache.to_native() for cache in session.caches]


def _adopting(base: CompiledDecodeSession, natives: list[Any], position: int) -> CompiledDecodeSession:
    """Return a session that held another text of the same length, and has taken native caches over in its place."""
    session = base.copy()
    session.prefill([[0] * position])
    pairs = zip(session.caches, natives, strict=True)
    return session.with_state([cache.refilled(native).state for cache, native in pairs])
