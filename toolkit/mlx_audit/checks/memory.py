"""MLX's active memory: what grows, measured so that nothing else seems to grow."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager

import mlx.core as mx

_LOOKS, _LOOK_SECONDS = 20, 0.05
"""How often, and how long, to wait for memory that is being freed."""


@contextmanager
def no_spare_buffers() -> Iterator[None]:
    """Free each buffer at once: a spare one may be larger than what it is used for next, and counts in full."""
    limit = mx.set_cache_limit(0)
    mx.clear_cache()
    try:
        yield
    finally:
        mx.set_cache_limit(limit)


def growth_since(start: int) -> int:
    """Return by how much active memory exceeds `start` when what is on its way out is gone.

    A device frees a buffer when it is done with it, which may be after the host; what leaks never goes.
    """
    growth = active_memory() - start
    for _ in range(_LOOKS):
        if growth <= 0:
            break
        time.sleep(_LOOK_SECONDS)
        growth = active_memory() - start
    return growth


def active_memory() -> int:
    """Return the bytes that live arrays take, garbage collected before."""
    mx.synchronize()
    gc.collect()
    return int(mx.get_active_memory())
