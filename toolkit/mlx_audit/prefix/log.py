"""What one request did, as a log line and as counts: outcome, reason, lengths, milliseconds, bytes."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from mlx_audit.errors import clean
from mlx_audit.prefix.index_results import IndexStats
from mlx_audit.prefix.plan import Plan
from mlx_audit.prefix.reasons import Reason

logger = logging.getLogger("mlx_audit.prefix")


@dataclass
class CacheStats:
    """Counts since the cache was made, and what it holds now; a copy that no longer changes.

    Attributes:
        hits: Requests that were served from an entry.
        misses: Requests that share no token with any entry.
        refusals: Requests that were served cold although they share tokens, by reason.
        shortenings: Hits that took up less than is shared, by reason.
        failures: Requests that ended in an error or were cancelled, by the error's name.
        input_tokens, cached_tokens: Of all requests, and how many of them were restored.
        insertions: Entries stored.
        not_inserted: What was not stored, by reason.
        evictions: Entries that went to make room.
        entries, leases, detached, nbytes, nodes: What is held now; `detached` entries have left and are still leased.
    """

    hits: int = 0
    misses: int = 0
    refusals: Counter[str] = field(default_factory=Counter)
    shortenings: Counter[str] = field(default_factory=Counter)
    failures: Counter[str] = field(default_factory=Counter)
    input_tokens: int = 0
    cached_tokens: int = 0
    insertions: int = 0
    not_inserted: Counter[str] = field(default_factory=Counter)
    evictions: int = 0
    entries: int = 0
    leases: int = 0
    detached: int = 0
    nbytes: int = 0
    nodes: int = 0


@dataclass
class Request:
    """One request while it is served; every stage adds its milliseconds.

    Attributes:
        tokens: Of the query.
        plan: What is restored.
        milliseconds: Of each stage: `lookup`, `restore`, `prefill`, `insert`.
        inserted: Bytes of the snapshots that it left.
        release: Ends the lease early, once the caches have copied what they took up, as their first update does.
    """

    tokens: int
    plan: Plan | None = None
    milliseconds: dict[str, float] = field(default_factory=lambda: {"lookup": 0.0, "restore": 0.0})
    inserted: int = 0
    release: Callable[[], None] = lambda: None

    @contextmanager
    def timed(self, stage: str) -> Iterator[None]:
        """Add the time of a block to a stage."""
        start = time.perf_counter()
        try:
            yield
        finally:
            spent = (time.perf_counter() - start) * 1000
            self.milliseconds[stage] = self.milliseconds.get(stage, 0.0) + spent


def outcome(plan: Plan) -> str:
    """Return `hit`, `miss`, or `refused`."""
    if plan.hit:
        return "hit"
    return "miss" if plan.reason is Reason.MISS else "refused"


class Counts:
    """Counts of requests, for many threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._stats = CacheStats()

    def served(self, request: Request, error: BaseException | None, held: int) -> None:
        """Count a request and log its line.

        Args:
            request: As it ended.
            error: What ended it, if anything did.
            held: Bytes that the cache holds now.
        """
        stats, plan = self._stats, request.plan
        with self._lock:
            stats.input_tokens += request.tokens
            if error is not None:
                stats.failures[type(error).__name__] += 1
            if plan is not None:
                stats.cached_tokens += plan.prefix
                self._planned(plan)
        name = "failed" if plan is None else outcome(plan)
        spent = " ".join(f"{stage}_ms={value:.2f}" for stage, value in request.milliseconds.items())
        logger.info(
            "outcome=%s reason=%s where=%s input_tokens=%d cached_tokens=%d %s inserted_bytes=%d held_bytes=%d%s",
            name,
            plan.reason.value if plan is not None and plan.reason is not None else "-",
            clean(plan.where).replace(" ", "_") if plan is not None and plan.where else "-",
            request.tokens,
            plan.prefix if plan is not None else 0,
            spent,
            request.inserted,
            held,
            f" error={type(error).__name__}" if error is not None else "",
        )

    def not_inserted(self, reason: str, detail: str = "") -> None:
        """Count a snapshot that was not stored, and log why."""
        with self._lock:
            self._stats.not_inserted[reason] += 1
        logger.info("not inserted: reason=%s %s", reason, clean(detail))

    def copy(self) -> CacheStats:
        """Return the counts until now; what is held now is not among them."""
        with self._lock:
            stats = self._stats
            return CacheStats(
                **{
                    name: getattr(stats, name) for name in ("hits", "misses", "input_tokens", "cached_tokens")
                },
                **{
                    name: getattr(stats, name).copy()
                    for name in ("refusals", "shortenings", "failures", "not_inserted")
                },
            )

    def with_held(self, held: IndexStats) -> CacheStats:
        """Return the counts until now, with what an index holds now."""
        names = ("insertions", "evictions", "entries", "leases", "detached", "nbytes", "nodes")
        return replace(self.copy(), **{name: getattr(held, name) for name in names})

    def _planned(self, plan: Plan) -> None:
        stats, reason = self._stats, plan.reason
        match outcome(plan):
            case "hit":
                stats.hits += 1
                if reason is not None:
                    stats.shortenings[reason.value] += 1
            case "miss":
                stats.misses += 1
            case _:
                stats.refusals[reason.value if reason is not None else "-"] += 1
