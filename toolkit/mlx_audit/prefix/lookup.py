"""From a query to candidates, best first, and from a candidate to live caches: the way that every request takes."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from mlx_audit.prefix.grid import Stops, common_stop, run_start, until
from mlx_audit.prefix.held import Held
from mlx_audit.prefix.index import PrefixIndex
from mlx_audit.prefix.layers import Layer
from mlx_audit.prefix.plan import Plan, Policy, plan
from mlx_audit.prefix.pool import Entry
from mlx_audit.prefix.radix_key import WIDTH, TokenKey, token_at
from mlx_audit.prefix.reasons import PrefixRefused, Reason
from mlx_audit.prefix.rules import RULES, Trims, refusal

_LATEST = 16
"""Entries beyond the shared part that are looked at; they differ in where they may be cut."""

Index = PrefixIndex[Held]


@dataclass(frozen=True)
class Query:
    """What is asked for.

    Attributes:
        namespace: Fingerprint of everything that must match.
        tokens: The whole query, one token or more.
        key: The same, packed.
        policy: How much of what is shared is wanted.
        minimum: Fewer tokens than these are not worth it.
        stops: Where the chunks of a cold run end; None: any prefix will do, whatever chunks have made it.
        placeholders: Ids that stand for parts of a picture or sound.
    """

    namespace: bytes
    tokens: Sequence[int]
    key: TokenKey
    policy: Policy = Policy.BOUNDARY
    minimum: int = 1
    stops: Stops | None = None
    placeholders: Collection[int] = field(default_factory=frozenset)


class Candidate(NamedTuple):
    """An entry, what of it the query may take up, and how many tokens the two share."""

    entry: Entry[Held]
    plan: Plan
    shared: int


@dataclass(frozen=True)
class Restored:
    """Live caches for one request.

    Attributes:
        caches: Native caches, for this request alone; None: the request runs cold.
        plan: How many tokens they hold and why not more.
        stops: Where the chunks ended that made them; None: not known.
        refused: What was tried before, best first.
    """

    caches: list[Any] | None
    plan: Plan
    stops: Stops | None = None
    refused: tuple[Plan, ...] = ()


def candidates(index: Index, query: Query) -> list[Candidate]:
    """Return all entries that share a token with the query, the longest usable prefix first; changes nothing."""
    found = {
        match.entry: match.matched
        for match in (
            *index.boundaries(query.namespace, query.key),
            *index.descendants(query.namespace, query.key, limit=_LATEST),
        )
    }
    planned = [
        Candidate(
            entry, _planned(entry.payload, query, shared, _following(index, query, entry, shared)), shared
        )
        for entry, shared in found.items()
        if shared
    ]
    # Of those that give the same, one that is not cut costs no more than it holds.
    planned.sort(key=lambda one: (-one.plan.prefix, -one.shared, one.plan.entry))
    return planned


def chosen(planned: Sequence[Candidate], query: Query) -> Plan:
    """Return the plan that serves, the first one, with the reason why a longer prefix does not."""
    if not planned:
        return Plan(0, len(query.tokens), 0, Reason.MISS)
    first = planned[0].plan
    longer = [one.plan for one in planned[1:] if not one.plan.hit and one.shared > first.prefix]
    if first.hit and first.reason is None and longer:
        return replace(first, reason=longer[0].reason, where=longer[0].where)
    return first


def stands_in(layers: Iterable[Layer]) -> bool:
    """Return whether a stack can serve in place of any shorter one, however long both are."""
    parts = (part for layer in layers for _, part in layer.walk("layer"))
    return all(RULES[part.kind].trims in (Trims.ALWAYS, Trims.WEAKEST) for part in parts)


@contextmanager
def restoring(index: Index, query: Query, found: Sequence[Candidate]) -> Iterator[Restored]:
    """Yield the best candidate that can still be had, leased until the block ends, however it ends.

    An entry that left meanwhile is passed over; one that cannot be restored is passed over with its reason, and
    where its file is damaged, it is taken out.
    """
    refused = [one for one in found if not one.plan.hit]
    for one in found[: len(found) - len(refused)]:
        with index.lease(one.entry) as entry:
            if entry is None:
                continue
            try:
                caches = _restored(index, query, one)
            except PrefixRefused as error:
                refused.insert(0, _failed(one, query, error))
                if error.reason is Reason.DAMAGED:
                    index.remove(entry)
                continue
            told = chosen([one, *refused], query)
            stops = until(entry.payload.stops, one.plan.prefix)
            yield Restored(caches, told, stops, tuple(other.plan for other in refused))
            return
    yield Restored(None, chosen(refused, query), (), tuple(other.plan for other in refused))


def _restored(index: Index, query: Query, wanted: Candidate) -> list[Any]:
    """Return new caches; the key is compared once more, token by token."""
    key, prefix = index.tokens_of(wanted.entry), wanted.plan.prefix
    if key is not None and key.data[: WIDTH * prefix] != query.key.data[: WIDTH * prefix]:
        raise PrefixRefused(Reason.KEY_MISMATCH, where="restore", found=key, allowed=query.key)
    return wanted.entry.payload.snapshot().restore(prefix)


def _following(index: Index, query: Query, entry: Entry[Held], shared: int) -> int | None:
    """Return the token of an entry's key after what is shared, where it may be one of a picture's."""
    if not query.placeholders or entry.length <= shared:
        return None
    key = index.tokens_of(entry)
    return None if key is None else token_at(key.data, WIDTH * shared)


def _planned(held: Held, query: Query, shared: int, following: int | None) -> Plan:
    """Plan one entry, first as far as its caches go, then as far as the chunk grid and placeholders allow."""
    count, layers = len(query.tokens), held.layers
    first = plan(layers, query=count, shared=shared, policy=query.policy, minimum=query.minimum)
    if not first.hit:
        return first
    most, reason = first.prefix, first.reason
    if query.stops is not None:
        most = common_stop(held.stops or (), query.stops, most)
        reason = reason if most == first.prefix else Reason.OFF_GRID
    start = run_start(query.tokens, most, query.placeholders, following if most == shared else None)
    if start != most:
        most, reason = start, Reason.MULTIMODAL
    if most == first.prefix:
        return first
    if most < max(1, query.minimum):
        return Plan(0, count, first.entry, reason)
    refused = refusal(layers, most)
    if refused is not None:
        return Plan(0, count, first.entry, reason, refused.where)
    return Plan(most, count - most, first.entry, reason)


def _failed(one: Candidate, query: Query, error: PrefixRefused) -> Candidate:
    cold = Plan(0, len(query.tokens), one.entry.length, error.reason, error.where or "")
    return one._replace(plan=cold)
