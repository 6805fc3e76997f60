"""What a restore hands on: to compiled decoding, and to a model that has read another text meanwhile."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from mlx_audit.checks.base import CheckFailed, Figures
from mlx_audit.checks.restored_runs import Continued, RestoreCheck, bits, prompts, turned
from mlx_audit.checks.runs import Eager, state_bytes, teacher_tokens
from mlx_audit.checks.subject import Subject
from mlx_audit.prefix import CachedSession, PrefixCache
from mlx_audit.prefix.snapshot import Snapshot

_BUDGET = 1 << 28
_CHUNK = 5
_STEPS = 3
_FURTHER = 17
_PARTS = ("the state differs", "the logits differ")


class CompiledAfterRestore(RestoreCheck):
    """Compiled steps after a restore equal those after a cold prompt.

    What it does:
        A session with an empty prefix cache reads a prompt and takes compiled steps. A second one reads the same
        prompt, of which all but the last token is restored, and a third a longer one, of which the shorter is. After
        the prompt and after each step, logits and every array of the session's state must equal, bit by bit, those of
        a session that restored nothing.

    Why:
        A session takes native caches over once. One that restored rows in another order, or of another length, gives
        it buffers that no cold prompt would have left.

    Example:
        prompt 30, step 1: the state differs from that after a cold prompt

    How to fix:
        Feed the rest of the prompt to what was restored, then hand the caches over as after any prompt.

    Sources:
        docs/session.md
    """

    code = "RST007"
    tier = "numeric"
    claim = "prefix_restore"
    requires = ("RST001", "PAR001", "STA001", "STA002", "LIF002")
    repeated = False

    def not_applicable(self, subject: Subject) -> str | None:
        if not subject.decodes:
            return "compiled decoding is not claimed of this variant: what is restored is decoded eagerly"
        return None

    def prove(self, subject: Subject) -> Figures:
        start = prompts(subject.model)[0].length
        longer = start + _FURTHER
        tokens = teacher_tokens(subject, longer + _STEPS, stream=46)
        kept = PrefixCache(subject.model, _BUDGET, chunk=_CHUNK)
        session = CachedSession(subject.model, longer + _STEPS, prefix_cache=kept, evidence="ignore")
        cold = {}
        for length in (longer, start):
            kept.clear()
            cold[length] = _decoded(session, tokens, length)
        for length in (start, longer):
            hits = kept.stats().hits
            warm = _decoded(session, tokens, length)
            if kept.stats().hits == hits:
                raise CheckFailed(
                    f"nothing was restored of a prompt of {length} tokens, of which some are stored"
                )
            for step, (got, want) in enumerate(zip(warm, cold[length], strict=True)):
                what = next(
                    (name for name, own, other in zip(_PARTS, got, want, strict=True) if own != other), ""
                )
                if what:
                    where = f"prompt {length}, step {step}"
                    raise CheckFailed(f"{where}: {what} from that after a cold prompt", where=where)
        return {"prompts": [start, longer], "steps": _STEPS, "restored": kept.stats().hits}


class NothingOutsideTheCaches(RestoreCheck):
    """What is restored goes on the same after the model has read another text.

    What it does:
        Takes a snapshot, lets the model read and decode another, longer text in caches of its own, then restores and
        goes on by one token and by a chunk. States and logits must equal those of a cold run that nothing interrupted.

    Why:
        A model that keeps part of its state on the module (a position, a delta of rotary angles, what the last chunk
        left) loses it to the next request; no snapshot of caches can carry it.

    Example:
        a prompt of 13 tokens, suffix 1: the logits differ by 0.041

    How to fix:
        Keep state in the caches. Until then, the claim cannot stand.

    Sources:
        ml-explore/mlx-swift-lm#443
    """

    code = "RST008"
    tier = "numeric"
    claim = "prefix_restore"
    requires = ("RST001",)
    repeated = False

    def prove(self, subject: Subject) -> Figures:
        model, continued, start = subject.model, Continued(), turned(subject.model)
        lengths = (1, _FURTHER)
        tokens = teacher_tokens(subject, start.length + max(lengths), stream=47)
        other = teacher_tokens(subject, 2 * start.length, stream=48)
        for length in lengths:
            suffix = tokens[start.length : start.length + length]
            wanted = start.run(model, tokens)
            expected = wanted.feed(suffix)  # before anything interrupts
            snapshot = Snapshot.take(start.run(model, tokens).cache, start.length)
            interrupting = Eager(model)
            interrupting.feed(other)
            interrupting.feed(other[:1])
            restored = Eager(model, cache=snapshot.restore())
            continued.end(restored, restored.feed(suffix), wanted, expected, f"{start}, suffix {length}")
        continued.suffixes.update(lengths)
        continued.require_equal()
        return {"interrupted_by": len(other) + 1, **continued.figures()}


def _decoded(session: CachedSession, tokens: Sequence[int], length: int) -> list[tuple[Any, ...]]:
    """Return the bytes of the state and of the logits after a prompt and after each step that follows it."""
    own = session.copy()
    found = []
    for step in range(_STEPS + 1):
        at = length + step
        logits: mx.array = own.step([tokens[at - 1]]) if step else own.prefill([list(tokens[:length])])
        found.append((state_bytes(own.state), bits(logits)))
    return found
