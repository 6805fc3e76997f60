"""Prefix caches over the tiny models, cold runs on named chunks, and bytes counted by somebody else."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import KVCache

from mlx_audit.prefix import Prefilled, PrefixCache
from mlx_audit.prefix.index import PrefixIndex
from mlx_audit.prefix.snapshot import Snapshot
from mlx_audit.prefix.snapshot_compare import differences
from prefix_models import Run, subject
from tiny_models import raw

BUDGET = 1 << 30
KEY = ("model", None, None)
"""What mlx-lm's server keys its cache by."""


def cache_of(family: str, **options: Any) -> PrefixCache:
    """Return an empty cache over a shared tiny model; chunks of 8 tokens, unless told otherwise."""
    return PrefixCache(subject(family), options.pop("max_bytes", BUDGET), **{"chunk": 8, **options})


def cold_run(family: str, tokens: Sequence[int], ends: Iterable[int] = ()) -> Run:
    """Return a cold run whose chunks end at these positions."""
    cuts = [0, *(end for end in ends if end < len(tokens)), len(tokens)]
    return Run(subject(family)).feed_all([tokens[a:b] for a, b in itertools.pairwise(cuts) if a < b])


def assert_equal(found: Prefilled, wanted: Prefilled, position: int) -> None:
    """Logits and every leaf of the state have the same bits."""
    assert raw(found.logits) == raw(wanted.logits)
    assert differences(found.caches, wanted.caches, position) == []


def digests(index: PrefixIndex[Any]) -> dict[tuple[int, ...], str]:
    """Return a digest of every byte of every entry, by key."""
    return {tuple(key): entry.payload.snapshot().digest() for key, entry in index.items()}


def bytes_held(index: PrefixIndex[Any]) -> int:
    """Count the bytes of all buffers that entries hold, by their addresses, each once."""
    buffers: dict[int, int] = {}
    for _, entry in index.items():
        for array in entry.payload.snapshot().arrays.values():
            seen = np.array(array, copy=False)
            buffers[seen.__array_interface__["data"][0]] = seen.nbytes
    return sum(buffers.values())


def linear(length: int, layers: int = 1) -> list[KVCache]:
    """Return a stack of attention caches that hold `length` rows, counted up."""
    caches = [KVCache() for _ in range(layers)]
    for cache in caches:
        feed_rows(cache, 0, length)
    return caches


def feed_rows(cache: Any, start: int, count: int) -> None:
    """Write rows whose values are their positions to a cache of keys and values."""
    rows = mx.broadcast_to(mx.arange(start, start + count).astype(mx.float32)[:, None], (1, 1, count, 4))
    keys, values = cache.update_and_fetch(rows, rows + 0.5)
    mx.eval(keys, values)


def taken(caches: Sequence[Any], position: int) -> Snapshot:
    return Snapshot.take(caches, position)
