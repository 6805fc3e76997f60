"""Nobody writes to a stored entry: neither who left it, nor who took it up."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from mlx_audit.checks.base import CheckFailed, Figures
from mlx_audit.checks.content import leaves
from mlx_audit.checks.restored_runs import RestoreCheck, bits, turned, twin
from mlx_audit.checks.runs import Eager, teacher_tokens
from mlx_audit.checks.subject import Subject
from mlx_audit.prefix import PrefixCache
from mlx_audit.prefix.snapshot import Snapshot

_BUDGET = 1 << 28
"""Bytes of the prefix cache; a tiny model fills a part of them."""

_CANARY = 77
"""Written over every number."""


class EntriesStandApart(RestoreCheck):
    """Nobody who left or took up an entry can change it, or what another one took up.

    What it does:
        Inserts the caches of a run into a prefix cache and writes a canary over every array and into every container
        of these caches, nested ones included; lets a second run, whose caches were inserted, go on. No byte of an
        entry may change. Takes the entry up three times, spoils the first at once and the third after it went on:
        neither the entry nor the second may change, and the second goes on as one that is taken up at the end.

    Why:
        Caches hand out their own lists and buffers. Who borrows an entry then writes over it, and the next request is
        answered by the rules of another.

    Example:
        writing to caches that were taken up changed a stored entry

    How to fix:
        Copy arrays and containers when an entry is inserted, and hand out new handles in new containers.

    Sources:
        ml-explore/mlx-lm ArraysCache.state (its own list); youssofal/MTPLX#247; waybarrios/vllm-mlx#575
    """

    code = "RST004"
    tier = "numeric"
    claim = "prefix_restore"
    requires = ("RST001",)
    repeated = False

    def prove(self, subject: Subject) -> Figures:
        start, further = turned(subject.model), 3
        tokens = teacher_tokens(subject, start.length + further, stream=43)
        key = tokens[: start.length]
        live, kept = start.run(subject.model, tokens), PrefixCache(subject.model, _BUDGET)
        going = twin(live)
        inserted = [_inserted(kept, key, run.cache) for run in (live, going)]

        def unchanged(what: str) -> None:
            if any(entry.digest() != before for entry, before in inserted):
                raise CheckFailed(f"{what} changed a stored entry", where=what)

        arrays, containers = spoil(live.cache)
        unchanged("writing to the caches that were inserted")
        going.feed(tokens[start.length :])
        spoil(going.cache)
        unchanged("the run that left it, going on,")
        with kept.restore(tokens) as first, kept.restore(tokens) as second, kept.restore(tokens) as third:
            held = _bytes(second.caches)
            spoil(first.caches)
            unchanged("writing to caches that were taken up")
            Eager(subject.model, cache=third.caches).feed(third.suffix)
            spoil(third.caches)
            unchanged("a run that took it up, going on,")
            if _bytes(second.caches) != held:
                raise CheckFailed("writing to caches that were taken up changed those of another request")
            logits = Eager(subject.model, cache=second.caches).feed(second.suffix)
        with kept.restore(tokens) as last:
            again = Eager(subject.model, cache=last.caches).feed(last.suffix)
        if bits(again) != bits(logits):
            raise CheckFailed("an entry goes on otherwise when it is taken up again")
        return {"arrays": arrays, "containers": containers, "taken_up": 4}


def _inserted(kept: PrefixCache, key: Sequence[int], caches: list[Any]) -> tuple[Snapshot, str]:
    """Insert caches; return the snapshot that is stored, and its digest."""
    entry = kept.insert(key, caches, position=len(key)).entry
    if entry is None:
        raise CheckFailed("the prefix cache did not take the entry")
    stored = entry.payload.snapshot()
    return stored, stored.digest()


def spoil(natives: Sequence[Any]) -> tuple[int, int]:
    """Write over every array of some caches in place, and empty their lists; return how many there were of each."""
    arrays = containers = 0
    for native in leaves(natives):
        for value in list(vars(native).values()):
            group = value if isinstance(value, list | tuple) else [value]
            for array in group:
                if isinstance(array, mx.array):
                    array[...] = _CANARY
                    mx.eval(array)
                    arrays += 1
            if isinstance(value, list):
                containers += 1
                value[:] = [None] * len(value)
    return arrays, containers


def _bytes(natives: Sequence[Any]) -> list[bytes]:
    """Return the bytes of every array of some caches, spare rows included."""
    found = []
    for native in leaves(natives):
        for value in vars(native).values():
            group = value if isinstance(value, list | tuple) else [value]
            found += [bits(array) for array in group if isinstance(array, mx.array)]
    return found
