"""The nearest known name, for messages."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


def nearest(found: object, known: Iterable[str]) -> str | None:
    """The known name that looks most like `found`, or None when nothing comes close."""
    matches = get_close_matches(str(found)[:100], list(known), n=1, cutoff=0.6)
    return matches[0] if matches else None


def did_you_mean(found: object, known: Iterable[str]) -> str | None:
    """A question that names the nearest known name, or None when nothing comes close."""
    name = nearest(found, known)
    return f"did you mean {name!r}?" if name is not None else None
