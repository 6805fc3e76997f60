"""The length of the key buffer taken for the position: under a fixed cache it is the capacity."""

from __future__ import annotations

import ast

from mlx_audit.source.events import Called, Combined, Finding, Rotated, Sliced, rule
from mlx_audit.source.tags import Tag
from mlx_audit.source.values import Value

_LENGTHS = Tag.LENGTH | Tag.BEFORE


def _taken(text: str) -> Finding:
    return Finding("SRC002", "key length", f"`{text}` takes the length of the keys for the position")


@rule(Called)
def rope(event: Called) -> Finding | None:
    """`mx.fast.rope(q, …, offset=S - L)`, and `nn.RoPE`."""
    layer = event.target.endswith("RoPE")
    offset = event.argument(1, "offset") if layer else event.keywords.get("offset")
    if offset is None or event.target.startswith("builtins.") or _passed_on(event):
        return None
    return _rotation(offset, event.text)


@rule(Rotated)
def own_rope(event: Rotated) -> Finding | None:
    """A RoPE class of mlx-lm, or of the model file, is told the offset."""
    return _rotation(event.offset, event.text)


def _passed_on(event: Called) -> bool:
    """Return whether the offset is a parameter of the rotation around it: then its caller was told."""
    given = [word.value for word in getattr(event.node, "keywords", []) if word.arg == "offset"]
    return event.frame.rotation and bool(given) and isinstance(given[0], ast.Name) and given[0].id == "offset"


def _rotation(offset: Value, text: str) -> Finding | None:
    if offset.has(_LENGTHS):
        return _taken(text)
    if offset.has(Tag.HELD):
        return Finding(
            "SRC006", "rope offset", f"`{text}` rotates by a number that the cache keeps on the host"
        )
    if offset.has(Tag.POSITION):
        return Finding("", "rope offset", f"`{text}` rotates by the position")
    return None


@rule(Called)
def first_position(event: Called) -> Finding | None:
    """`mx.arange(S - L, S)`: the queries' positions, counted back from the end of the buffer."""
    if event.target.rpartition(".")[2] != "arange" or len(event.positional) < 2:
        return None
    return _taken(event.text) if event.positional[0].has(_LENGTHS) else None


@rule(Called)
def embedding(event: Called) -> Finding | None:
    """`wpe(mx.arange(L) + S)`."""
    if event.target.endswith("Embedding") and event.tags & _LENGTHS:
        return _taken(event.text)
    return None


@rule(Combined)
def shifted_range(event: Combined) -> Finding | None:
    """`mx.arange(L) + S - L`: positions counted from the length."""
    one, two = event.left, event.right
    if event.operator not in ("add", "subtract"):
        return None
    shifted = (one.has(Tag.RANGE) and two.has(_LENGTHS)) or (two.has(Tag.RANGE) and one.has(_LENGTHS))
    return _taken(event.text) if shifted and not (one.has(Tag.RANGE) and two.has(Tag.RANGE)) else None


@rule(Sliced)
def first_row(event: Sliced) -> Finding | None:
    """`table[S - L :]`, `keys[:, :, -window:]`: rows counted back from the end of the buffer."""
    counted = any(bound.has(Tag.BEFORE) for bound in event.lower)
    row = any(index.has(_LENGTHS) and not index.has(Tag.DATA | Tag.MASK) for index in event.indices)
    return _taken(event.text) if counted or row or event.tail else None
