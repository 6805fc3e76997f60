"""The layers of a model as a strip: one glyph a layer, in numbered rows that show what repeats."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

GLYPHS = {
    "linear": ("█", "blue"),
    "rotating": ("▄", "yellow"),
    "chunked": ("▚", "cyan"),
    "quantized": ("▒", "green"),
    "arrays": ("○", "magenta"),
    "composite": ("╬", "red"),
    "none": ("·", "dim"),
}
"""Glyph and colour of each cache kind; the forms differ where there is no colour."""

UNKNOWN = ("?", "bold red")

_ROW = 40
_LONGEST_GROUP = 20


def glyphs(labels: Iterable[str]) -> dict[str, tuple[str, str]]:
    """Return glyph and colour of each cache by its label; a kind's second set of parameters is drawn as a digit."""
    found: dict[str, tuple[str, str]] = {}
    kinds, digits = set[str](), iter("23456789")
    for label in dict.fromkeys(labels):
        kind = label.partition("(")[0]
        glyph, colour = GLYPHS.get(kind, UNKNOWN)
        found[label] = (next(digits, "+") if kind in kinds else glyph, colour)
        kinds.add(kind)
    return found


def rows(layers: Sequence[str]) -> Iterator[tuple[int, list[list[str]]]]:
    """Yield rows of at most 40 layers: the number of the first one, and groups of labels, a period each."""
    size = _period(layers) or 10
    width = max(1, _ROW // size) * size
    for start in range(0, len(layers), width):
        row = layers[start : start + width]
        yield start, [list(row[at : at + size]) for at in range(0, len(row), size)]


def _period(layers: Sequence[str]) -> int | None:
    """Return after how many layers the list repeats, its end cut anywhere; None where it does not, or all are equal."""
    for period in range(1, min(len(layers) // 2, _LONGEST_GROUP) + 1):
        if layers[period:] == layers[:-period]:
            return period if period > 1 else None
    return None
