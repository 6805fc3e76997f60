"""The chunk grid: where a prompt's chunks end, so that a warm run feeds the very chunks that a cold one feeds.

A chunk of 256 tokens and one of 100 and one of 156 give states that differ in the last bits. So "equal to a cold run"
means: equal to a cold run whose chunks end at the same positions.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from mlx_audit.errors import ShapeMismatch
from mlx_audit.prefix.plan import MARGIN, Policy

Stops = tuple[int, ...]
"""Positions, ascending, at which chunks have ended."""


def stops_of(
    tokens: Sequence[int],
    chunk: int,
    policy: Policy = Policy.BOUNDARY,
    named: Iterable[int] = (),
    placeholders: Collection[int] = frozenset(),
) -> Stops:
    """Return where a cold prefill of `tokens` ends its chunks, the end of the prompt left out.

    These are the multiples of `chunk`, the positions that the caller names, and the boundary of the policy. Where a
    position lies inside a run of placeholders, no chunk ends there.

    Raises:
        ShapeMismatch: a named position is no whole number from 1.
    """
    count = len(tokens)
    wanted = {*range(chunk, count, chunk), boundary_of(count, policy), *_positions(named)}
    inside = (stop for stop in wanted if 0 < stop < count)
    return tuple(sorted(stop for stop in inside if run_start(tokens, stop, placeholders) == stop))


def boundary_of(count: int, policy: Policy) -> int:
    """Return the last position at which a prompt of `count` tokens leaves a snapshot; 0 or less: nowhere."""
    return count - (MARGIN if policy is Policy.MARGIN else 1)


def run_start(
    tokens: Sequence[int], position: int, placeholders: Collection[int], other: int | None = None
) -> int:
    """Return `position`, or where it lies inside a run of placeholders, the start of that run.

    Args:
        tokens: The text.
        position: Where it is parted.
        placeholders: Ids that stand for parts of a picture or sound.
        other: The token that follows in another text, which is the same up to `position`.
    """
    following = {other} if position >= len(tokens) else {tokens[position], other}
    if not placeholders or position < 1 or following.isdisjoint(placeholders):
        return position
    while position > 0 and tokens[position - 1] in placeholders:
        position -= 1
    return position


def common_stop(own: Stops, wanted: Stops, most: int) -> int:
    """Return the last position, at most `most`, up to which two runs have fed the same chunks; 0: none."""
    last = 0
    for one, other in zip(own, wanted, strict=False):
        if one != other or one > most:
            break
        last = one
    return last


def until(stops: Stops | None, position: int) -> Stops | None:
    """Return the stops up to `position`, or None where no chunk has ended there, so that the grid is not known."""
    if stops is None or position not in stops:
        return None
    return tuple(stop for stop in stops if stop <= position)


def _positions(named: Iterable[int]) -> list[int]:
    positions = list(named)
    for stop in positions:
        if isinstance(stop, bool) or not isinstance(stop, int) or stop < 1:
            raise ShapeMismatch(
                "a stop is no position in a text", where="stops", found=repr(stop), allowed="integers from 1"
            )
    return positions
