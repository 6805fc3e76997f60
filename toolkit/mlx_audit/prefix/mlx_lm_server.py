"""A drop-in for mlx-lm's `LRUPromptCache`: the same calls, and what comes back is proved or not given.

`python -m mlx_audit.prefix.mlx_lm_server --model ...` starts mlx-lm's own server with it.
"""

from __future__ import annotations

import itertools
import sys
import threading
from collections import OrderedDict
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import mlx_lm.server
from mlx_lm.utils import _parse_size

from mlx_audit.errors import describe
from mlx_audit.prefix.held import Held
from mlx_audit.prefix.index import PrefixIndex
from mlx_audit.prefix.log import CacheStats, Counts, Request
from mlx_audit.prefix.lookup import Index, Query, candidates, restoring, stands_in
from mlx_audit.prefix.plan import Policy
from mlx_audit.prefix.pool import EntryKind
from mlx_audit.prefix.radix_key import MOST, TokenKey
from mlx_audit.prefix.reasons import PrefixRefused
from mlx_audit.prefix.snapshot import Snapshot

KINDS = {"assistant": EntryKind.OUTPUT, "user": EntryKind.CHECKPOINT, "system": EntryKind.PROMPT}
"""mlx-lm's types of entries, in the order in which they are evicted there and here."""

_MOST_PICTURES = 4096
"""Pictures whose ids are remembered; one that was forgotten gets a new id, which no entry has."""


class PrefixPromptCache:
    """Has the calls of `mlx_lm.models.cache.LRUPromptCache`, without its faults.

    A fetch always leaves a token to feed, gives caches of the request's own, and makes the entry the most recently
    used. An insert copies, keeps both limits, and stores nothing where key and caches contradict each other. Neither
    raises for what a request may contain: mlx-lm calls them where an error would end the server. What is refused is
    counted by reason in `stats()` and logged.

    Prefixes are taken up wherever the caches allow, whatever chunks have made them: mlx-lm's server ends chunks where
    requests meet.
    """

    def __init__(
        self,
        max_size: int = 10,
        max_bytes: int = 1 << 63,
        *,
        policy: Policy | str = Policy.BOUNDARY,
        minimum: int = 1,
    ) -> None:
        """Make an empty cache of at most `max_size` entries and `max_bytes` bytes of unique arrays."""
        self.max_size, self.max_bytes = max_size, max_bytes
        self._policy, self._minimum = Policy(policy), minimum
        self._index: Index = PrefixIndex(max_bytes, max_size)
        self._counts = Counts()
        self._spaces: dict[Hashable, bytes] = {}
        self._media: OrderedDict[int, int] = OrderedDict()
        self._ids = itertools.count(MOST, -1)
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._index)

    @property
    def nbytes(self) -> int:
        """Bytes of all unique arrays that are held."""
        return self._index.nbytes

    @property
    def index(self) -> Index:
        """The prefix index, to look at."""
        return self._index

    def fetch_nearest_cache(
        self, model: Hashable, tokens: Sequence[int]
    ) -> tuple[list[Any] | None, Sequence[int]]:
        """Return caches of the longest usable prefix and the tokens after it, one or more; else None and all tokens.

        Args:
            model: What mlx-lm's server knows of the model: paths of model, adapter and draft model.
            tokens: The prompt; a negative id stands for a patch of a picture, as mlx-lm's server makes them.
        """
        request = Request(len(tokens))
        error: Exception | None = None
        caches: list[Any] | None = None
        try:
            if len(tokens):
                with request.timed("lookup"):
                    query = self._query(model, tokens)
                    found = candidates(self._index, query)
                with request.timed("restore"), restoring(self._index, query, found) as restored:
                    caches, request.plan = restored.caches, restored.plan
        except Exception as caught:  # a request is served cold rather than not at all
            error, caches, request.plan = caught, None, None
        self._counts.served(request, error, self.nbytes)
        if caches is None or request.plan is None:
            return None, tokens
        return caches, tokens[request.plan.prefix :]

    def insert_cache(
        self,
        model: Hashable,
        tokens: Sequence[int],
        prompt_cache: Sequence[Any],
        *,
        cache_type: str = "assistant",
    ) -> None:
        """Store a copy of caches that have taken in exactly `tokens`; otherwise count and log why not."""
        try:
            key = self._key(tokens)
            held = Held(Snapshot.take(prompt_cache, len(key)))
            kind = KINDS[cache_type]
            supersede = stands_in(held.layers)
            done = self._index.insert(self._space(model), key, held, kind, supersede=supersede)
        except PrefixRefused as refused:
            self._counts.not_inserted(refused.reason.value, str(refused))
        except Exception as error:
            self._counts.not_inserted("error", describe(error))
        else:
            if done.reason is not None:
                self._counts.not_inserted(done.reason, done.detail)

    def trim_to(self, *, n_sequences: int | None = None, n_bytes: int | None = None) -> None:
        """Evict until no more entries and bytes are left than these."""
        entries = None if n_sequences is None else max(0, n_sequences)
        self._index.trim_to(None if n_bytes is None else max(0, n_bytes), entries)

    def stats_by_type(self) -> dict[str, dict[str, int]]:
        """Return entries and bytes by mlx-lm's types; an array that two entries share counts for both."""
        entries = [entry for _, entry in self._index.items()]
        return {
            name: {
                "n_sequences": sum(entry.kind == kind for entry in entries),
                "n_bytes": sum(entry.nbytes for entry in entries if entry.kind == kind),
            }
            for name, kind in KINDS.items()
        }

    def stats(self) -> CacheStats:
        """Return the counts until now, and what is held now."""
        return self._counts.with_held(self._index.stats)

    def _query(self, model: Hashable, tokens: Sequence[int]) -> Query:
        key = self._key(tokens)
        return Query(
            self._space(model),
            list(key),
            key,
            self._policy,
            self._minimum,
            placeholders=self._pictures(),
        )

    def _key(self, tokens: Sequence[int]) -> TokenKey:
        """Return packed ids; negative ones, which name a picture, get ids of their own from the top down."""
        if not any(isinstance(token, int) and token < 0 for token in tokens):
            return TokenKey(tokens)
        with self._lock:
            key = TokenKey([token if token >= 0 else self._picture(token) for token in tokens])
            while len(self._media) > _MOST_PICTURES:
                self._media.popitem(last=False)
            return key

    def _picture(self, token: int) -> int:
        """Return the id of a picture; ids are never given out again."""
        if token not in self._media:
            self._media[token] = next(self._ids)
        self._media.move_to_end(token)
        return self._media[token]

    def _pictures(self) -> frozenset[int]:
        with self._lock:
            return frozenset(self._media.values())

    def _space(self, model: Hashable) -> bytes:
        """Return the namespace of a model key, the same for equal keys."""
        with self._lock:
            return self._spaces.setdefault(model, len(self._spaces).to_bytes(8, "big"))


@contextmanager
def installed(max_bytes: int | None = None, **options: Any) -> Iterator[None]:
    """Let `mlx_lm.server` make a `PrefixPromptCache` where it would make its own cache.

    Args:
        max_bytes: Budget; mlx-lm's server gives its cache the number of entries only.
        options: Of `PrefixPromptCache`.
    """
    limit: dict[str, Any] = {} if max_bytes is None else {"max_bytes": max_bytes}
    with patch.object(mlx_lm.server, "LRUPromptCache", partial(PrefixPromptCache, **limit, **options)):
        yield


def main(arguments: Sequence[str] | None = None) -> None:
    """Run mlx-lm's server with its own options; `--prompt-cache-bytes` is kept on every path."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    with patch.object(sys, "argv", [sys.argv[0], *given]), installed(_budget(given)):
        mlx_lm.server.main()


def _budget(arguments: Sequence[str]) -> int | None:
    """Return what `--prompt-cache-bytes` says, as mlx-lm's server will read it."""
    option = "--prompt-cache-bytes"
    for index, argument in enumerate(arguments):
        name, equals, value = argument.partition("=")
        if name == option:
            text = value if equals else next(iter(arguments[index + 1 : index + 2]), "")
            try:
                size: int = _parse_size(text)
                return size
            except (ValueError, ArithmeticError, KeyError):
                return None  # mlx-lm's own parser refuses it, with its usage
    return None


if __name__ == "__main__":
    main()
