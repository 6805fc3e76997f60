"""Where values come from, as bits."""

from __future__ import annotations

from collections.abc import Iterable
from functools import reduce
from operator import or_
from typing import TypeAlias

Tags: TypeAlias = int
"""Several of `Tag`, as bits."""


class Tag:
    """Where a value comes from: plain bits, which are several times as fast as `enum.Flag`."""

    NONE = 0
    POSITION = 1 << 0
    """The position from a cache, or what is reckoned from it."""
    LENGTH = 1 << 1
    """The length of the key buffer, which is its capacity under fixed caches."""
    BEFORE = 1 << 2
    """A key length less something: what eager code takes for a position."""
    RANGE = 1 << 3
    """An array of consecutive numbers."""
    DATA = 1 << 4
    """An array that depends on the step's tokens, or on what caches hold."""
    KEYS = 1 << 5
    """An array along a cache's buffer: its key length is the capacity."""
    MASK = 1 << 6
    """A boolean mask."""
    SHAPE = 1 << 7
    """A host number or type of an array in the step."""
    OWN = 1 << 8
    """An array held by a cache class of the model's own."""
    HELD = 1 << 9
    """A host number that such a cache holds, or a length of what it holds."""
    UNKNOWN = 1 << 10
    """Came from something that could not be followed."""
    LASTING = 1 << 11
    """A container that outlives the step: of a module, or global."""
    GROWN = 1 << 13
    """An array that such a cache makes longer at each step."""
    UNMASKED = 1 << 14
    """Scores over a cache's keys, of which none is hidden yet."""
    MASKED = 1 << 15
    """Scores in which a mask was applied."""
    KEPT = 1 << 12
    """What a module kept from an earlier step."""


POSITIONS = Tag.POSITION | Tag.LENGTH | Tag.BEFORE | Tag.RANGE
STATE = Tag.POSITION | Tag.DATA | Tag.KEYS | Tag.MASK | Tag.OWN | Tag.GROWN | Tag.HELD | Tag.KEPT


def union(tags: Iterable[Tags]) -> Tags:
    """Return all of these tags."""
    return reduce(or_, tags, Tag.NONE)
