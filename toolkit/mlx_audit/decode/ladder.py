"""The ladder: how much of a large buffer a step attends over, in few sizes, so that there are few traces."""

from __future__ import annotations

_STEP = 256
"""MLX's fused attention kernels want multiples of this; docs/src/usage/kv_cache.rst."""


def next_rung(rung: int) -> int:
    """Return the rung above `rung`: the last plus the larger of 256 and a quarter of it, rounded down to 256."""
    return rung + max(_STEP, rung // 4 // _STEP * _STEP)


def rung_for(tokens: int, capacity: int) -> int:
    """Return the lowest rung that holds `tokens`; the capacity itself is the top one.

    A rung costs one trace, and attention over it costs in proportion, so steps grow with the rung: a ladder that
    doubles wastes up to half of each step just past a rung.
    """
    rung = _STEP
    while rung < tokens:
        rung = next_rung(rung)
    return min(rung, capacity)
