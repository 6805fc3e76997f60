"""What a step keeps: in the caches, or where it is lost."""

from __future__ import annotations

from mlx_audit.source.events import Called, Combined, Finding, Kept, Memoized, Stored, rule
from mlx_audit.source.judging import holds_cache
from mlx_audit.source.tags import STATE, Tag

_THREADED = frozenset(
    {"", "update_and_fetch", "keys", "values", "offset", "_idx", "start_position", "state", "lengths", "left_padding",
     "cache"}
)  # fmt: skip
"""What a model may set on a cache: its items, and what fixed-capacity caches thread through the step."""


@rule(Stored)
def outside(event: Stored) -> Finding | None:
    """`self._position = offset + 1`, `_MASKS[n] = mask`."""
    if not event.value.all_tags() & STATE and not holds_cache(event.value):
        return None
    if event.memo:
        return Finding("SRC004", "memoized", f"`{event.place}` keeps what one step made for all later ones")
    return Finding("SRC004", "module state", f"`{event.place}` keeps decode state outside the caches")


@rule(Memoized)
def memoized(event: Memoized) -> Finding | None:
    """A function under `lru_cache` that takes the position, a mask, or data of the step."""
    if not event.value.tags & STATE:
        return None
    return Finding("SRC004", "memoized", f"`{event.name}` is memoized, and takes what changes at each step")


@rule(Kept)
def updated(event: Kept) -> Finding | None:
    """`cache.update_and_fetch(k, v)`, `cache[0] = state`; and a host number in a cache of the model's own."""
    if event.own:
        return Finding(
            "SRC006", "own cache", f"`{event.name}` is kept on the host by a cache class of the model's own"
        )
    if event.name in _THREADED:
        return Finding("", "update", f"`{event.text}` updates the cache")
    return Finding(
        "SRC004", "cache attribute", f"`{event.text}` is no part of the state that a cache hands on"
    )


@rule(Called)
def grown(event: Called) -> Finding | None:
    """`mx.concatenate([cached, new])` in a cache of the model's own."""
    if event.target in ("mlx.core.concatenate", "mlx.core.stack") and event.tags & Tag.GROWN:
        what = f"`{event.text}` grows what a cache class of the model's own holds"
        return Finding("SRC006", "own cache", what, goes_on=True)
    return None


@rule(Combined)
def reckoned(event: Combined) -> Finding | None:
    """`mx.arange(L) + offset`: arithmetic on the position that stays in the graph."""
    if (event.left.tags | event.right.tags) & Tag.POSITION:
        return Finding("", "array arithmetic", f"`{event.text}` reckons with the position in the graph")
    return None
