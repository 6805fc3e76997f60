"""Does a session survive leaving its process, and do caches change hands without loss?"""

from __future__ import annotations

import tempfile
from pathlib import Path

from mlx_audit.checks.base import Check, CheckFailed, Figures
from mlx_audit.checks.runs import (
    PROMPT,
    Comparer,
    Eager,
    same_bytes,
    session_for,
    state_bytes,
    teacher_tokens,
)
from mlx_audit.checks.subject import Subject
from mlx_audit.decode import CompiledDecodeSession


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
        Turns the session's caches into native ones after some compiled steps and continues eagerly; hands an eagerly
        prefilled and stepped native cache to a session and continues compiled. Both are compared with eager decoding.

    Why:
        Prefill is eager, and a server may fall back to eager decoding in the middle of a text. A shift of all
        positions, invisible inside one kind of cache, shows when caches change hands.

    Example:
        logits differ at eager step 1 after compiled decoding

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
        tokens = teacher_tokens(subject, PROMPT + 6, stream=8)
        prompt, forced = tokens[:PROMPT], tokens[PROMPT:]
        session, eager = session_for(subject, PROMPT + 6), Eager(subject.model)
        session.prefill([prompt])
        eager.feed(prompt)
        comparer = Comparer(subject.tolerance)
        for token in forced[:3]:
            session.step([token])
            eager.feed([token])
        before = state_bytes(session.state)
        handed = Eager(subject.model, cache=[cache.to_native() for cache in session.caches])
        adopted = session.with_state(
            [cache.refilled(own).state for cache, own in zip(session.caches, eager.cache, strict=True)]
        )
        for step, token in enumerate(forced[3:], start=1):
            want = eager.feed([token])
            comparer.check(handed.feed([token]), want, f"eager step {step} after compiled decoding")
            comparer.check(adopted.step([token]), want, f"compiled step {step} after eager decoding")
        if state_bytes(session.state) != before:
            raise CheckFailed("eager decoding on the caches that were handed over changed the session's own")
        return comparer.figures()
