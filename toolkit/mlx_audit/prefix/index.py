"""The prefix index: which token prefix was seen, with leases and a byte budget, for many threads.

One lock is held while the tree and the counts change, never while arrays are copied: whoever restores takes a lease,
copies, and lets it go. A payload says its leaves before the lock is taken.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Generic

from mlx_audit.errors import describe
from mlx_audit.prefix.index_results import IndexStats, Inserted, Match, matches_of, rows_of
from mlx_audit.prefix.pool import Entry, EntryKind, EntryPool, P, leaves_of
from mlx_audit.prefix.radix import RadixTree
from mlx_audit.prefix.radix_check import require
from mlx_audit.prefix.radix_key import IndexMisuse, TokenKey, Tokens
from mlx_audit.prefix.radix_node import RadixNode
from mlx_audit.prefix.reasons import PrefixRefused, Reason


class PrefixIndex(Generic[P]):
    """Payloads under token prefixes, in namespaces that share nothing.

    Lookups change nothing but recency, and that only for the one entry that they answer with. Entries found are held
    by no one until they are leased; `lease` says when one has left meanwhile. A hit is counted when an entry is leased,
    a miss or refusal when the caller says so, so that a request counts once whatever it looked up.
    """

    def __init__(self, max_bytes: int, max_entries: int | None = None) -> None:
        """An empty index.

        Args:
            max_bytes: Budget of the unique leaves of all entries.
            max_entries: Most entries, or None for as many as the bytes allow.
        """
        self._lock = threading.RLock()
        self._tree: RadixTree[Entry[P]] = RadixTree()
        self._pool: EntryPool[P, RadixNode[Entry[P]]] = EntryPool(max_bytes, max_entries)
        self._stats = IndexStats()

    def __len__(self) -> int:
        with self._lock:
            return len(self._pool)

    def __repr__(self) -> str:
        with self._lock:
            return f"<PrefixIndex {self._pool!r}, {self._tree!r}>"

    @property
    def nbytes(self) -> int:
        """Bytes of all unique leaves that are held."""
        with self._lock:
            return self._pool.nbytes

    @property
    def stats(self) -> IndexStats:
        """Counts until now, and what is held now."""
        with self._lock:
            said, pool, tree = self._stats, self._pool, self._tree
            return IndexStats(
                **{name: getattr(said, name) for name in ("hits", "misses", "insertions")},
                **{name: said.__dict__[name].copy() for name in ("refusals", "not_inserted", "left")},
                entries=len(pool),
                leases=pool.leases,
                detached=len(pool.detached),
                nbytes=pool.nbytes,
                nodes=tree.nodes,
                edge_bytes=tree.edge_bytes,
            )

    def boundary(self, namespace: bytes, tokens: Tokens, at_most: int | None = None) -> Match[P] | None:
        """The deepest entry whose whole key is a prefix of the query; it becomes the most recently used."""
        key = TokenKey(tokens)
        with self._lock:
            return self._used(self.boundaries(namespace, key, at_most))

    def boundaries(
        self, namespace: bytes, tokens: Tokens, at_most: int | None = None
    ) -> tuple[Match[P], ...]:
        """All entries whose whole key is a prefix of the query, deepest first, none longer than `at_most` tokens."""
        key = _key(namespace, tokens)
        with self._lock:
            return matches_of(self._tree.boundaries(namespace, key, at_most))

    def descendant(self, namespace: bytes, tokens: Tokens, at_most: int | None = None) -> Match[P] | None:
        """The most recently used of the entries that share most of the query; that is what it becomes again."""
        key = TokenKey(tokens)
        with self._lock:
            return self._used(self.descendants(namespace, key, at_most))

    def descendants(
        self, namespace: bytes, tokens: Tokens, at_most: int | None = None, limit: int = 1
    ) -> tuple[Match[P], ...]:
        """Up to `limit` entries that share most of the query, the most recently used first.

        They serve only where a stack can be trimmed exactly: their own keys may go on beyond what is shared.
        """
        key = _key(namespace, tokens)
        with self._lock:
            return matches_of(self._tree.descendants(namespace, key, at_most, limit))

    def insert(
        self,
        namespace: bytes,
        tokens: Tokens,
        payload: P,
        kind: EntryKind = EntryKind.PROMPT,
        *,
        supersede: bool = False,
    ) -> Inserted[P]:
        """Store a payload under a key, in place of any that is there, or change nothing at all.

        Args:
            namespace: Fingerprint of everything that must match.
            tokens: The key, at least one token.
            payload: What is stored; it must no longer change.
            kind: Where it was taken, which decides how early it goes.
            supersede: Remove all entries that are shorter prefixes of the key and not leased. Only for stacks that
                trim exactly: on others the shorter ones are the only ones that can serve a shorter query.

        Raises:
            ShapeMismatch, IndexMisuse: The key, namespace or kind is unusable.
        """
        key, kind = _key(namespace, tokens, least=1), _kind(kind)
        try:
            leaves = leaves_of(payload)
        except PrefixRefused as refusal:
            return self._not_inserted(refusal.reason, str(refusal))
        except Exception as error:
            return self._not_inserted("payload", describe(error))
        with self._lock:
            return self._insert(Entry(namespace, len(key), kind, payload, leaves), key, supersede)

    @contextmanager
    def lease(self, entry: Entry[P]) -> Iterator[Entry[P] | None]:
        """Hold an entry: it is not evicted before the block ends, however it ends.

        Yields the entry, now the most recently used, and counts a hit; or None where it has left the index, and the
        next candidate must be tried.
        """
        held = False
        try:
            with self._lock:
                if entry.left is None:
                    self._touch(entry)
                    self._stats.hits += 1
                    self._pool.lease(entry)
                    held = True
            yield entry if held else None
        finally:
            if held:
                with self._lock:
                    self._pool.release(entry)

    def count_refusal(self, reason: str) -> None:
        """Count a request that was served without an entry, and why: `miss`, or the code of a refusal."""
        with self._lock:
            if reason == Reason.MISS:
                self._stats.misses += 1
            else:
                self._stats.refusals[reason] += 1

    def remove(self, entry: Entry[P]) -> bool:
        """Take one entry out, leased or not; False where it had left before."""
        with self._lock:
            if entry.left is not None:
                return False
            self._let_go(entry, "removed")
            return True

    def clear(self, namespace: bytes | None = None) -> int:
        """Take out all entries, or all of one namespace, and return how many; holders of leases keep theirs."""
        with self._lock:
            chosen = [entry for entry in self._pool if namespace in (None, entry.namespace)]
            for entry in chosen:
                self._let_go(entry, "cleared")
            return len(chosen)

    def trim_to(self, max_bytes: int | None = None, max_entries: int | None = None) -> tuple[Entry[P], ...]:
        """Evict, by the rule of the pool, until no more is left than said, or nothing but what is leased."""
        most = self._pool.max_bytes if max_bytes is None else max(0, max_bytes)
        with self._lock:
            victims = self._pool.victims({}, (), most, max_entries, new=0)
            if victims is None:
                victims = [entry for entry in self._pool if not entry.leases]
            for entry in victims:
                self._let_go(entry, "evicted")
            return tuple(victims)

    def tokens_of(self, entry: Entry[P]) -> TokenKey | None:
        """The key of an entry, or None where it has left the index."""
        with self._lock:
            node = self._pool.place(entry)
            return self._tree.key(node) if node is not None else None

    def items(self) -> list[tuple[TokenKey, Entry[P]]]:
        """Keys and entries, in the order in which they would be evicted."""
        with self._lock:
            return [(self._tree.key(self._node(entry)), entry) for entry in self._pool]

    def tree(self) -> list[dict[str, Any]]:
        """The tree for people: one row for each node, a parent before its children, edges abbreviated.

        Rows have `namespace` (hexadecimal), `depth` (nodes above), `length` (tokens up to here), `edge`, and `entry`
        (kind, bytes, leases) or None.
        """
        with self._lock:
            return rows_of(self._tree)

    def check(self) -> None:
        """Raise AssertionError, naming what is broken, unless all invariants hold."""
        with self._lock:
            self._tree.check()
            self._pool.check()
            require(self._tree.entries == len(self._pool), self, "tree and pool have different entries")
            stamps: dict[EntryKind, int] = {}
            for key, entry in self.items():
                node = self._node(entry)
                require(node.value is entry, entry, "the entry stands at a node of another")
                require(len(key) == entry.length, entry, f"the entry's key has {len(key)} tokens")
                found = self._tree.find(entry.namespace, key)
                require(found is node, entry, "the entry is not found under its own key")
                require(
                    stamps.get(entry.kind, 0) < node.stamp,
                    entry,
                    "tree and pool disagree on what was used last",
                )
                stamps[entry.kind] = node.stamp

    def _used(self, matches: tuple[Match[P], ...]) -> Match[P] | None:
        if not matches:
            return None
        self._touch(matches[0].entry)
        return matches[0]

    def _insert(self, entry: Entry[P], key: TokenKey, supersede: bool) -> Inserted[P]:
        pool, leaves = self._pool, entry.leaves
        if (leaf := pool.conflict(leaves)) is not None:
            return self._not_inserted("payload", f"leaf {leaf!r} is held with another number of bytes")
        if entry.nbytes > pool.max_bytes:
            return self._not_inserted(Reason.TOO_LARGE, f"{entry.nbytes:,} bytes, budget {pool.max_bytes:,}")
        # What leaves anyway is known before room is sought: else replacing an entry at capacity would cost another.
        shorter = [found.node.value for found in self._tree.boundaries(entry.namespace, key)]
        replaced = [old for old in shorter if old is not None and old.length == len(key)]
        superseded = [old for old in shorter if old is not None and old.length < len(key) and not old.leases]
        leaving = replaced + (superseded if supersede else [])
        victims = pool.victims(leaves, leaving, pool.max_bytes, pool.max_entries)
        if victims is None:
            return self._not_inserted(Reason.LEASED, "what may be evicted leaves too little room")
        self._place(entry, key, replaced)
        for old in leaving[len(replaced) :]:
            self._let_go(old, "superseded")
        for old in victims:
            self._let_go(old, "evicted")
        self._stats.insertions += 1
        return Inserted(entry, evicted=tuple(victims))

    def _place(self, entry: Entry[P], key: TokenKey, replaced: list[Entry[P]]) -> None:
        node = self._tree.insert(entry.namespace, key, entry)
        for old in replaced:
            self._pool.remove(old, "replaced")
            self._stats.left["replaced"] += 1
        self._pool.add(entry, node)

    def _let_go(self, entry: Entry[P], why: str) -> None:
        self._tree.remove(self._node(entry))
        self._pool.remove(entry, why)
        self._stats.left[why] += 1

    def _touch(self, entry: Entry[P]) -> None:
        self._tree.touch(self._node(entry))
        self._pool.touch(entry)

    def _node(self, entry: Entry[P]) -> RadixNode[Entry[P]]:
        node = self._pool.place(entry)
        if node is None:
            raise IndexMisuse("the entry is not in the index", where="entry", found=entry)
        return node

    def _not_inserted(self, reason: str, detail: str) -> Inserted[P]:
        with self._lock:
            self._stats.not_inserted[reason] += 1
        return Inserted(None, reason, detail)


def _key(namespace: bytes, tokens: Tokens, least: int = 0) -> TokenKey:
    if not isinstance(namespace, bytes):
        raise IndexMisuse(
            "a namespace is no bytes", where="namespace", found=repr(namespace), allowed="bytes"
        )
    key = TokenKey(tokens)
    if len(key) < least:
        raise IndexMisuse("an entry needs at least one token", where="tokens", found="none")
    return key


def _kind(kind: EntryKind) -> EntryKind:
    if kind not in list(EntryKind):
        allowed = ", ".join(EntryKind)
        raise IndexMisuse("there is no such kind of entry", where="kind", found=repr(kind), allowed=allowed)
    return EntryKind(kind)
