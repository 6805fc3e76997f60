"""The restore rules: which prefix of a stored layer may be given back, by cache kind; plan, docs, audit read them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from mlx_audit.prefix.layers import Layer
from mlx_audit.prefix.reasons import Reason


class Restorable(StrEnum):
    """Where a stored layer may be taken up."""

    ANY = "any position up to its own"
    WINDOW = "its own position, or any while every row is there"
    BOUNDARY = "its own position only"
    WEAKEST = "where all its parts may be"


class Trims(StrEnum):
    """When a layer gives back tokens exactly; otherwise it gives back none."""

    ALWAYS = "always"
    UNWRAPPED = "while it holds no more tokens than its window"
    RETAINED = "while the rows of a whole chunk before the cut are there"
    NEVER = "never"
    WEAKEST = "when all its parts do"


@dataclass(frozen=True)
class Rule:
    """What may be done with one kind of cache.

    Attributes:
        kind: The manifest's name, or `concatenated`, which no manifest states.
        native: mlx-lm's class, matched exactly.
        restorable: Where it may be taken up.
        trims: When it may be cut to a shorter prefix.
        counts: Whether the class counts its tokens; else the snapshot carries the position.
        refusals: The reasons that it refuses with.
    """

    kind: str
    native: str
    restorable: Restorable
    trims: Trims
    counts: bool
    refusals: tuple[Reason, ...] = ()


RULES: Mapping[str, Rule] = {
    rule.kind: rule
    for rule in (
        Rule("linear", "KVCache", Restorable.ANY, Trims.ALWAYS, counts=True),
        Rule("concatenated", "ConcatenateKVCache", Restorable.ANY, Trims.ALWAYS, counts=True),
        Rule("quantized", "QuantizedKVCache", Restorable.ANY, Trims.ALWAYS, counts=True),
        Rule(
            "rotating",
            "RotatingKVCache",
            Restorable.WINDOW,
            Trims.UNWRAPPED,
            counts=True,
            refusals=(Reason.WRAPPED_RING,),
        ),
        Rule(
            "chunked",
            "ChunkedKVCache",
            Restorable.WINDOW,
            Trims.RETAINED,
            counts=True,
            refusals=(Reason.PARTIAL_TRIM, Reason.WINDOW_SLID),
        ),
        Rule(
            "arrays",
            "ArraysCache",
            Restorable.BOUNDARY,
            Trims.NEVER,
            counts=False,
            refusals=(Reason.RECURRENT_OFF_BOUNDARY,),
        ),
        Rule("composite", "CacheList", Restorable.WEAKEST, Trims.WEAKEST, counts=False),
    )
}
"""One rule for each kind; a class without one is refused."""


@dataclass(frozen=True)
class Refusal:
    """Why a stack cannot be taken up at a prefix.

    Attributes:
        reason: The code.
        where: The layer that refuses.
    """

    reason: Reason
    where: str


def refusal(layers: Iterable[Layer], prefix: int) -> Refusal | None:
    """Return why a stack may not be taken up at `prefix` tokens, or None if it may; nothing is changed."""
    for index, stored in enumerate(layers):
        for where, layer in stored.walk(f"layer {index}"):
            reason = _refusal_of(layer, prefix)
            if reason is not None:
                return Refusal(reason, f"{where} ({layer.kind})")
    return None


def has_recurrence(layers: Iterable[Layer]) -> bool:
    """Return whether a stack holds state that is usable at its own position only, parts included."""
    return any(
        RULES[layer.kind].restorable is Restorable.BOUNDARY
        for stored in layers
        for _, layer in stored.walk("layer")
    )


def table() -> str:
    """Return the rules as a Markdown table."""
    rows = [
        "| kind | mlx-lm class | may be taken up at | gives tokens back | position | refuses with |",
        "|---|---|---|---|---|---|",
    ]
    for rule in RULES.values():
        codes = ", ".join(f"`{reason.value}`" for reason in rule.refusals)
        position = "counted" if rule.counts else "carried by the snapshot"
        rows.append(
            f"| {rule.kind} | `{rule.native}` | {rule.restorable} | {rule.trims} | {position} | {codes} |"
        )
    return "\n".join(rows) + "\n"


def _refusal_of(layer: Layer, prefix: int) -> Reason | None:
    """Return why one layer refuses; a composite one leaves the answer to its parts."""
    if prefix == layer.position:
        return None
    if not 0 < prefix < layer.position:
        return Reason.POSITION_MISMATCH
    match RULES[layer.kind].trims:
        case Trims.ALWAYS | Trims.WEAKEST:
            return None
        case Trims.NEVER:
            return Reason.RECURRENT_OFF_BOUNDARY
        case Trims.UNWRAPPED:
            return Reason.WRAPPED_RING if layer.position > layer.parameters["max_size"] else None
        case Trims.RETAINED:
            return _retained(layer, prefix)


def _retained(layer: Layer, prefix: int) -> Reason | None:
    """Refuse a cut that a cold run would have reached with more rows than there are now."""
    start = layer.parameters["start_position"]
    if start == 0:
        return None
    if prefix <= start:
        return Reason.PARTIAL_TRIM
    return Reason.WINDOW_SLID if prefix - layer.parameters["chunk_size"] < start else None
