"""Who sees whom: the masks of every kind of cache, and the slots that a model really reads."""

from __future__ import annotations

from functools import partial
from typing import Any

import mlx.core as mx
from hypothesis import strategies as st

from mlx_audit.checks.base import Check, CheckFailed, Figures
from mlx_audit.checks.numbered import NumberedText, require_right
from mlx_audit.checks.parts import (
    POISON,
    Part,
    PartSpec,
    capacity_for,
    parts_of,
    poisoned,
    slotted_kinds,
    specs_of,
    without_slots,
)
from mlx_audit.checks.properties import require_always
from mlx_audit.checks.runs import Eager, session_for, teacher_tokens
from mlx_audit.checks.subject import Subject
from mlx_audit.checks.tolerance import largest, largest_difference
from mlx_audit.decode import CompiledDecodeSession

_PLAIN = 1e-3
"""Of the largest logit: a difference that no rounding makes."""


class AttendedTokens(Check):
    """Each token attends to exactly the right tokens.

    What it does:
        For each kind of cache that the model has, writes keys and values that tell which token they are, in drawn
        chunks that cross windows and wraps, adopts the cache and goes on, with trims in between: what the mask shows
        must be exactly the set that the cache's parameters ask for. The prompts 1, W−1, W, W+1, 2W+1, C−1 and C of a
        window W and a capacity C are always among them, and each ring turns three times. Then changes what a slot
        holds, one cache at a time: the logits must move if and only if those of eager decoding move on the same
        changed cache.

    Why:
        An edge off by one lets a token see the future, or forget the nearest past. A ring that forgets its first
        tokens, or overwrites one too early, goes on fluently. A row that is all false gives the mean of all values,
        not an error.

    Example:
        rotating of 8: at position 9 the mask of query 0 shows tokens [1, …, 9], wanted [2, …, 9]

    How to fix:
        Look at `make_mask`: query time ≥ key time, and query time < key time + window; and at the slot that a token is
        written to.

    Sources:
        mlx_lm/models/base.py create_causal_mask; ml-explore/mlx-lm#390 (a window one key too wide)
    """

    code = "MSK001"
    tier = "numeric"
    requires = ("PAR003", "STA002")
    repeated = False

    def not_applicable(self, subject: Subject) -> str | None:
        return without_slots(subject)

    def run(self, subject: Subject) -> Figures:
        kinds = slotted_kinds(subject)
        tally = {"masks": 0, "attended": 0, "hidden": 0}
        capacity = capacity_for([part.spec for part in kinds])
        for part in kinds:
            _drive(subject, part, capacity_for([part.spec]), tally)
        base, specs = session_for(subject, capacity), specs_of(subject)
        strategy = {
            "prompt": st.integers(1, capacity - 6),
            "steps": st.integers(0, 2),
            "slot": st.integers(0, capacity - 1),
            "pick": st.integers(0, len(specs) - 1),
        }
        example = partial(self._example, subject, base, specs, tally)
        always = [
            {"prompt": 6, "steps": 0, "slot": 1, "pick": 0},
            {"prompt": 1, "steps": 0, "slot": 4, "pick": 0},
        ]
        require_always(subject, strategy, example, always=always)
        if not tally["attended"]:
            raise CheckFailed(
                "no changed slot moved the logits, in eager decoding neither: the tiny model is blind",
                figures=dict(tally),
            )
        return {**tally, "caches": [part.spec.label for part in kinds]}

    @staticmethod
    def _example(
        subject: Subject,
        base: CompiledDecodeSession,
        specs: list[PartSpec],
        tally: dict[str, int],
        prompt: int,
        steps: int,
        slot: int,
        pick: int,
    ) -> None:
        tokens = teacher_tokens(subject, prompt + steps + 1, stream=9)
        session = base.copy()
        session.prefill([tokens[:prompt]])
        for token in tokens[prompt:-1]:
            session.step([token])
        parts = parts_of(session.caches, specs)
        clean = session.copy().step(tokens[-1:]), _handed(session).feed(tokens[-1:])
        for spec in dict.fromkeys(part.spec for part in parts if part.slotted):
            of_kind = [part for part in parts if part.slotted and part.spec == spec]
            chosen = of_kind[pick % len(of_kind)]
            at = slot % chosen.cache.slots
            where = f"{chosen.name}, slot {at}, at position {session.position}"
            slots = {chosen.name: [at]}
            moved = _moves_as_eager(
                lambda value, slots=slots: poisoned(session, parts, value, slots),
                tokens[-1],
                clean,
                where,
                # Where sums may differ in order, another order of the chosen keys is no sign of a key that is seen.
                subject.tolerance.relative * largest(clean[0]),
            )
            tally["attended" if moved else "hidden"] += 1


def _moves_as_eager(
    changed: Any, token: int, clean: tuple[mx.array, mx.array], where: str, rounding: float
) -> bool:
    """Return whether a changed slot moves the logits, and require that eager decoding agrees.

    A change that eager decoding barely notices proves nothing in either direction. A key of a huge wrong value may
    take all weight from itself; then the opposite value gets it.
    """
    for value in (POISON, -POISON):
        got = largest_difference(changed(value).step([token]), clean[0])
        want = largest_difference(_handed(changed(value)).feed([token]), clean[1])
        if got == 0 and want > _PLAIN * largest(clean[1]):
            raise CheckFailed(
                f"{where} is ignored: changing it left the logits as they were, and moved eager ones by {want:.3g}",
                where=where,
            )
        if want > 0 or got <= rounding:
            return got > rounding
    raise CheckFailed(
        f"{where} is seen: changing it moved the logits by {got:.3g}, and eager ones not at all", where=where
    )


def _handed(session: CompiledDecodeSession) -> Eager:
    """Return eager decoding on what a session's caches hold."""
    return Eager(session.model, cache=[cache.to_native() for cache in session.caches])


def _drive(subject: Subject, part: Part, capacity: int, tally: dict[str, int]) -> None:
    """Require that one kind of cache shows the right tokens, whatever came before."""
    window = part.spec.ring or 3
    piece = st.integers(1, window + 2)
    strategy = {
        "prompt": st.integers(1, capacity),
        "chunks": st.lists(piece, max_size=4),
        "calls": st.lists(st.one_of(st.just(1), piece, st.integers(-3, -1)), max_size=12),
        "narrow": st.integers(1, window),
        "cut": st.booleans(),
    }
    edges = {1, window - 1, window, window + 1, 2 * window + 1, capacity - 1, capacity}
    in_pieces = {"chunks": [2, max(1, window - 1)], "calls": [1, 3, 1, -1, 1], "narrow": 1, "cut": True}
    at_once = {"chunks": [], "calls": [window + 1], "narrow": max(1, window // 2), "cut": False}
    always = [{"prompt": edge, **way} for edge in sorted(edges - {0}) for way in (in_pieces, at_once)]
    require_always(subject, strategy, partial(_one_text, part, capacity, tally), always=always, share=2)


def _one_text(
    part: Part,
    capacity: int,
    tally: dict[str, int],
    prompt: int,
    chunks: list[int],
    calls: list[int],
    narrow: int,
    cut: bool,
) -> None:
    """Write a prompt in chunks to a native cache, adopt it, and go on to the last slot.

    Args:
        calls: Tokens of each call; a negative one is a trim.
        narrow: A window to ask for as well.
        cut: Whether attention reads no further than the rung, and a chunked cache drops its front.
    """
    text, native = NumberedText(part.spec), part.spec.new_native()
    for length in _plan(prompt, chunks):
        if cut and part.spec.kind == "chunked":
            native.maybe_trim_front()
        native.update_and_fetch(*text.more(length))
    cache = type(part.cache).adopt(native, capacity)
    pending = [*calls, *[1] * capacity]
    while len(text.tokens) < capacity:
        length = min(pending.pop(0), capacity - len(text.tokens))
        if length > 0:
            cache = cache.at_rung(len(text.tokens) + length) if cut else cache
            tally["masks"] += require_right(cache, text, length, narrow)
        elif (back := min(-length, len(text.tokens) - 1)) and cache.trim(back) == back:
            # Whether it told the truth is what STA003 asks; here, what is seen after it did.
            del text.tokens[cache.count() :]


def _plan(prompt: int, chunks: list[int]) -> list[int]:
    """Return the lengths of chunks that make up a prompt; the last one takes what is left."""
    plan, left = [], prompt
    for chunk in chunks:
        if chunk < left:
            plan.append(chunk)
            left -= chunk
    return [*plan, left]
