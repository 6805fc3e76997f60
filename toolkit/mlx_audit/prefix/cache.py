"""PrefixCache: what a model has read once is not read again, and goes on exactly as a cold run would.

Three levels: the **prefix index** knows which token prefixes were seen; each request gets a **live request cache**, a
stack of the model's own classes; and its **per-layer caches** each have their own rule of what may be restored.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache

from mlx_audit.errors import ShapeMismatch
from mlx_audit.prefix import store
from mlx_audit.prefix.arguments import (
    Namespace,
    Taken,
    require_policy,
    require_position,
    require_sizes,
    stated,
)
from mlx_audit.prefix.fingerprint import Fingerprint
from mlx_audit.prefix.grid import Stops, stops_of
from mlx_audit.prefix.held import Held
from mlx_audit.prefix.index import PrefixIndex
from mlx_audit.prefix.index_results import Inserted
from mlx_audit.prefix.layers import Layer, kind_for
from mlx_audit.prefix.live_model import LiveModel
from mlx_audit.prefix.log import CacheStats, Counts, Request
from mlx_audit.prefix.lookup import Index, Query, candidates, chosen, restoring, stands_in
from mlx_audit.prefix.plan import Plan, Policy
from mlx_audit.prefix.pool import EntryKind
from mlx_audit.prefix.prefill import Prefill, Prefilled
from mlx_audit.prefix.radix_key import TokenKey, Tokens
from mlx_audit.prefix.reasons import PrefixRefused, Reason
from mlx_audit.prefix.snapshot import Snapshot
from mlx_audit.prefix.snapshot_fit import require_fitting, require_form
from mlx_audit.prefix.store_format import require_stops

CHUNK = 256
"""Tokens that a prefill feeds at once."""


class PrefixCache:
    """Prefixes of one model, for many threads.

    The caches of a request belong to its thread. MLX calls of several threads on one model are put in a row by `lock`:
    `prefill` holds it for one chunk at a time; hold it around forward calls of your own.

    Attributes:
        model: An mlx-lm model.
        lock: Held around forward calls and copies.
        chunk: Tokens that `prefill` feeds at once; chunks end at its multiples.
        exact: Whether `prefill` takes up only prefixes at which a cold run ends a chunk, too.
    """

    def __init__(
        self,
        model: nn.Module,
        max_bytes: int,
        *,
        policy: Policy | str = Policy.BOUNDARY,
        namespace: Namespace | None = None,
        max_entries: int | None = None,
        minimum: int = 1,
        chunk: int = CHUNK,
        exact: bool = True,
        checkpoints: int = 8,
        checkpoint_bytes: int | None = None,
        placeholders: Collection[int] = frozenset(),
        make_cache: Callable[[nn.Module], list[Any]] = make_prompt_cache,
    ) -> None:
        """Make an empty cache.

        Args:
            model: An mlx-lm model.
            max_bytes: Budget of all entries, in bytes of unique arrays.
            policy: `boundary` leaves a snapshot one token before the end of the prompt; `margin` 16 before.
            namespace: Fields of the fingerprint that the model does not tell: tokenizer, template, adapter, tenant...
            max_entries: Most entries; None: as many as the bytes allow.
            minimum: Fewer tokens than these are not restored.
            chunk: Tokens that `prefill` feeds at once.
            exact: Take up only prefixes at which a cold run ends a chunk, too, so that a warm run is equal to it bit by
                bit. False: take up all that is shared; the last bits may differ.
            checkpoints: Most snapshots that one `prefill` leaves, where a stack cannot be cut back.
            checkpoint_bytes: Most bytes of them together, known before the first is taken; None: a quarter of the
                budget.
            placeholders: Token ids that stand for parts of a picture or sound.
            make_cache: Makes the stack of a request, where it is not the model's own (`max_kv_size`, quantized).

        Raises:
            ShapeMismatch, IndexMisuse: a size or the policy is unusable.
            PrefixRefused: unknown-class: a cache of the model has no restore rule.
        """
        require_sizes(minimum=(minimum, 1), chunk=(chunk, 1), checkpoints=(checkpoints, 0))
        require_policy(policy)
        self.model, self.chunk, self.exact = model, chunk, exact
        self.lock = threading.RLock()
        self._policy, self._minimum = Policy(policy), minimum
        self._placeholders = frozenset(placeholders)
        self._make = make_cache
        self._index: Index = PrefixIndex(max_bytes, max_entries)
        self._counts = Counts()
        self._fresh = self.fresh()
        for index, cache in enumerate(self._fresh):
            kind_for(cache, f"layer {index}")
        share = max_bytes // 4 if checkpoint_bytes is None else checkpoint_bytes
        self._prefill = Prefill(self, most=checkpoints, most_bytes=share)
        self._live = LiveModel(model, stated(namespace), self.lock, self._prefill.forget)
        self._live.fingerprint()

    def __len__(self) -> int:
        return len(self._index)

    def __repr__(self) -> str:
        return f"<PrefixCache of {type(self.model).__module__}, {self._index!r}>"

    @property
    def policy(self) -> Policy:
        """How much of what is shared is taken up."""
        return self._policy

    @property
    def placeholders(self) -> frozenset[int]:
        """Token ids that stand for parts of a picture or sound."""
        return self._placeholders

    @property
    def index(self) -> Index:
        """The prefix index, to look at: `items()`, `tree()`, `check()`."""
        return self._index

    @property
    def nbytes(self) -> int:
        """Bytes of all unique arrays that are held."""
        return self._index.nbytes

    def fresh(self) -> list[Any]:
        """Return an empty stack, as the model's own `make_cache` makes it."""
        return self._make(self.model)

    def fingerprint(self, namespace: Namespace | None = None) -> Fingerprint:
        """Return what must be the same for an entry to serve: the cache's own namespace, with these fields in it."""
        return replace(self._live.fingerprint(), **stated(namespace))

    def stops(self, tokens: Tokens, named: Iterable[int] = ()) -> Stops:
        """Return where `prefill` ends its chunks, the end of the prompt left out; `named` positions are among them."""
        ids = list(TokenKey(tokens))
        return stops_of(ids, self.chunk, self._policy, named, self._placeholders)

    def plan(self, tokens: Tokens, *, namespace: Namespace | None = None, stops: Stops | None = None) -> Plan:
        """Return what would be restored, and why not more; changes nothing, recency included.

        Args:
            tokens: The whole query, one or more.
            namespace: Fields of the fingerprint for this query.
            stops: Only prefixes that these chunks have made (`PrefixCache.stops`); None: any.

        Raises:
            ShapeMismatch: there are no tokens, or something is no id.
        """
        query = self._query(tokens, namespace, stops)
        if self._lacks_media(query, namespace):
            return Plan(0, len(query.tokens), 0, Reason.MULTIMODAL, "namespace")
        return chosen(candidates(self._index, query), query)

    @contextmanager
    def restore(
        self, tokens: Tokens, *, namespace: Namespace | None = None, stops: Stops | None = None
    ) -> Iterator[Taken]:
        """Yield caches and what is left to feed; the entry is leased until the block ends, however it ends.

        The best prefix that can still be had is restored; where none can, the caches are empty. Arguments and errors
        are those of `plan`.
        """
        with self.requesting(tokens, namespace=namespace, stops=stops) as (taken, _):
            yield taken

    @contextmanager
    def requesting(
        self, tokens: Tokens, *, namespace: Namespace | None = None, stops: Stops | None = None
    ) -> Iterator[tuple[Taken, Request]]:
        """As `restore`, with the record of the request, which is counted and logged when the block ends."""
        query = self._query(tokens, namespace, stops)
        request = Request(len(query.tokens))
        error: BaseException | None = None
        try:
            with request.timed("lookup"):
                lacking = self._lacks_media(query, namespace)
                found = [] if lacking else candidates(self._index, query)
            with ExitStack() as lease:
                with request.timed("restore"):
                    restored = lease.enter_context(restoring(self._index, query, found))
                plan = (
                    Plan(0, request.tokens, 0, Reason.MULTIMODAL, "namespace") if lacking else restored.plan
                )
                request.plan, request.release = plan, lease.close
                caches = restored.caches if restored.caches is not None else self.fresh()
                suffix = list(query.tokens[plan.prefix :])
                yield Taken(caches, suffix, plan, restored.refused, restored.stops), request
        except BaseException as caught:
            error = caught
            raise
        finally:
            self._counts.served(request, error, self._index.nbytes)

    def insert(
        self,
        tokens: Tokens,
        caches: Sequence[Any],
        *,
        kind: EntryKind | str = EntryKind.PROMPT,
        position: int | None = None,
        namespace: Namespace | None = None,
        stops: Stops | None = None,
    ) -> Inserted[Held]:
        """Store a copy of a live stack under the tokens that it has taken in, or change nothing.

        Args:
            tokens: The key.
            caches: The stack; it may go on at once.
            kind: `prompt`, `checkpoint` or `output` (prompt and answer), which go in the reverse order.
            position: Tokens that the stack has taken in. Layers that count are compared with the key in any case; a
                stack of which none counts needs it, since nothing else could tell.
            namespace: Fields of the fingerprint for this entry.
            stops: Where the chunks ended that made it, the length of the key last; None: not known, so that it serves
                no query that asks for a grid, as `prefill` does while `exact`.

        Returns:
            The entry; or why there is none: `too-large` or `leased`.

        Raises:
            PrefixRefused: position-mismatch, unknown-class, batched, other-fingerprint, multimodal.
        """
        key = TokenKey(tokens)
        try:
            require_position(key, caches, position)
            require_stops(stops, len(key), "insert(stops)")
            query = self._query(key, namespace, None)
            if self._lacks_media(query, namespace):
                raise PrefixRefused(Reason.MULTIMODAL, "the namespace names no media", where="insert")
            with self.lock:
                snapshot = Snapshot.take(caches, len(key))
            self._require_own(snapshot.layers)
        except PrefixRefused as error:
            self._counts.not_inserted(error.reason.value, str(error))
            raise
        return self.keep(query.namespace, key, Held(snapshot, stops), EntryKind(kind))

    def keep(self, namespace: bytes, key: TokenKey, held: Held, kind: EntryKind) -> Inserted[Held]:
        """Store what was copied; where the stack can be cut to any shorter prefix, shorter entries go."""
        supersede = stands_in(held.layers) and self._may_stand_in(namespace, key, held)
        inserted = self._index.insert(namespace, key, held, kind, supersede=supersede)
        if inserted.reason is not None:
            self._counts.not_inserted(inserted.reason, inserted.detail)
        return inserted

    def refuse(self, reason: Reason, detail: str) -> None:
        """Count and log a snapshot that is not taken."""
        self._counts.not_inserted(reason.value, detail)

    def prefill(
        self,
        tokens: Tokens,
        *,
        stops: Iterable[int] = (),
        namespace: Namespace | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> Prefilled:
        """Read a prompt: restore what is stored, feed the rest in chunks, and leave snapshots for the next request.

        Args:
            tokens: The prompt.
            stops: Positions where prompts will part, such as the end of a system prompt. A chunk ends there, and it is
                taken up there.
            namespace: Fields of the fingerprint for this request.
            progress: Called after each chunk with the tokens read and those of the prompt. What it raises cancels the
                request; snapshots that were taken until then are sound and stay.

        Returns:
            Logits `[1, vocabulary]` after the last token, the caches, and the plan.

        Raises:
            PrefixRefused: multimodal: the tokens hold placeholders, which have no embedding of their own; restore, and
                feed the embeddings yourself.
        """
        return self._prefill(TokenKey(tokens), stops, namespace, progress)

    def save(self, folder: str | Path, *, namespace: Namespace | None = None) -> int:
        """Write all entries of one namespace as the whole content of a store; return the bytes of its files.

        One folder holds one namespace. Killed at any point, it holds the old store or the new one.

        Raises:
            PrefixRefused: busy, too-large, damaged: an entry that was loaded, and not read yet, has lost its file.
        """
        self._live.fingerprint(read=True)
        world = self.fingerprint(namespace)
        space = bytes.fromhex(world.digest)
        held = [(key, entry) for key, entry in self._index.items() if entry.namespace == space]
        with self.lock:
            entries = [
                store.SavedEntry(list(key), one.payload.snapshot(), one.payload.stops, one.kind.value)
                for key, one in held
            ]
            return store.save(Path(folder), entries, world)

    def load(self, folder: str | Path, *, namespace: Namespace | None = None, verify: bool = False) -> int:
        """Add the entries of a store and return how many are held now; all are looked at before any is added.

        Arrays are read, and their checksums verified, when a request first wants them, or here with `verify`.

        Raises:
            PrefixRefused: format-version, other-fingerprint, unknown-field, unknown-class, damaged, position-mismatch.
                Nothing was added.
        """
        self._live.fingerprint(read=True)
        world = self.fingerprint(namespace)
        entries = store.load(Path(folder), world, verify=verify)
        for entry in entries:
            self._require_own(entry.layers)
        space = bytes.fromhex(world.digest)
        added = [
            self.keep(
                space, TokenKey.of_bytes(entry.tokens), Held(entry, entry.stops), EntryKind(entry.kind)
            ).entry
            for entry in entries
        ]
        return sum(entry is not None and entry.left is None for entry in added)

    def clear(self, namespace: Namespace | None = None) -> int:
        """Take out all entries, or those of one namespace, and return how many; the weights are read once more.

        Call it after a change of weights in place (`weight += 1`), which nothing else notices.
        """
        self._live.fingerprint(read=True)
        if namespace is None:
            return self._index.clear()
        return self._index.clear(bytes.fromhex(self.fingerprint(namespace).digest))

    def stats(self) -> CacheStats:
        """Return the counts until now, and what is held now."""
        return self._counts.with_held(self._index.stats)

    def _query(self, tokens: Tokens, namespace: Namespace | None, stops: Stops | None) -> Query:
        key = TokenKey(tokens)
        if not len(key):
            raise ShapeMismatch("there is nothing to read", where="tokens", found="no tokens")
        return Query(
            bytes.fromhex(self.fingerprint(namespace).digest),
            list(key),
            key,
            self._policy,
            self._minimum,
            stops,
            self._placeholders,
        )

    def _require_own(self, layers: Sequence[Layer]) -> None:
        """Refuse a stack that this model cannot have made."""
        require_fitting(layers, self._fresh)
        require_form(layers, self._prefill.costs().layers)

    def _lacks_media(self, query: Query, namespace: Namespace | None) -> bool:
        """Return whether placeholders stand for media that nobody has named: they are the same for all of them."""
        if not self._placeholders or self._placeholders.isdisjoint(query.tokens):
            return False
        return self.fingerprint(namespace).media is None

    def _may_stand_in(self, namespace: bytes, key: TokenKey, held: Held) -> bool:
        """Return whether an entry may take the place of shorter ones: not where only they know their grid."""
        if held.stops is not None:
            return True
        shorter = self._index.boundaries(namespace, key, len(key) - 1)
        return all(match.entry.payload.stops is None for match in shorter)
