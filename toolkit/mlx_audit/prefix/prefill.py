"""Prefill through the cache: on a fixed chunk grid, with snapshots whose bytes are known before the first is taken."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import mlx.core as mx

from mlx_audit.adapters.module_state import ModuleState
from mlx_audit.decode.step import run
from mlx_audit.prefix.arguments import Namespace
from mlx_audit.prefix.grid import Stops, boundary_of, stops_of
from mlx_audit.prefix.held import Held
from mlx_audit.prefix.layers import Layer
from mlx_audit.prefix.log import Request
from mlx_audit.prefix.plan import Plan
from mlx_audit.prefix.pool import EntryKind
from mlx_audit.prefix.radix_key import TokenKey
from mlx_audit.prefix.reasons import PrefixRefused, Reason
from mlx_audit.prefix.snapshot import Snapshot
from mlx_audit.prefix.snapshot_grid import Costs, checkpoints

if TYPE_CHECKING:
    from mlx_audit.prefix.cache import PrefixCache

_SAMPLE = 32
"""Tokens of the lazy run that tells what a snapshot costs; more than any convolution looks back."""


class Prefilled(NamedTuple):
    """A prompt that was read.

    Attributes:
        logits: `[1, vocabulary]`, after the last token.
        caches: Native caches that hold the whole prompt; they are the request's own.
        plan: How much of it was restored.
    """

    logits: mx.array
    caches: list[Any]
    plan: Plan


class Prefill:
    """Reads prompts for a `PrefixCache`.

    Args:
        owner: The cache.
        most: Most snapshots a request.
        most_bytes: Most bytes of these together.
    """

    def __init__(self, owner: PrefixCache, *, most: int, most_bytes: int) -> None:
        self._owner = owner
        self._most, self._most_bytes = most, most_bytes
        self._measured: Costs | None = None

    def __call__(
        self,
        key: TokenKey,
        named: Iterable[int],
        namespace: Namespace | None,
        progress: Callable[[int, int], None] | None,
    ) -> Prefilled:
        """Read one prompt; see `PrefixCache.prefill`."""
        owner, tokens, named = self._owner, list(key), tuple(named)
        if not owner.placeholders.isdisjoint(tokens):
            raise PrefixRefused(
                Reason.MULTIMODAL,
                "placeholders cannot be read as text",
                where="prefill(tokens)",
                fix="use restore(tokens), feed the embeddings of the suffix, and insert(tokens, caches)",
            )
        stops = stops_of(tokens, owner.chunk, owner.policy, named)
        asked = stops if owner.exact else None
        with owner.lock:
            before = ModuleState(owner.model)
        with owner.requesting(key, namespace=namespace, stops=asked) as (taken, request):
            space = bytes.fromhex(owner.fingerprint(namespace).digest)
            ahead = [stop for stop in stops if stop > taken.plan.prefix]
            kept = self._kept(taken.plan.prefix, len(tokens), ahead, named)
            history, start = taken.stops, taken.plan.prefix
            for end in (*ahead, len(tokens)):
                with request.timed("prefill"):
                    logits = self._feed(tokens[start:end], taken.caches, last=end == len(tokens))
                request.release()
                history = None if history is None else (*history, end)
                if end in kept and self._stateless(before):
                    with request.timed("insert"):
                        self._keep(request, space, tokens[:end], taken.caches, history, kept[end])
                if progress is not None:
                    progress(end, len(tokens))
                start = end
        return Prefilled(logits, taken.caches, taken.plan)

    def forget(self) -> None:
        """Measure anew what snapshots cost: the model has changed."""
        self._measured = None

    def _feed(self, chunk: Sequence[int], caches: list[Any], *, last: bool) -> mx.array:
        """Feed one chunk; only the last one's logits are computed."""
        with self._owner.lock:
            logits = run(self._owner.model, mx.array([chunk]), caches)
            state = [cache.state for cache in caches]
            mx.eval(logits, state) if last else mx.eval(state)
        return logits

    def _stateless(self, before: ModuleState) -> bool:
        """Return whether the forwards kept all they know in the caches; what lies elsewhere no snapshot carries."""
        with self._owner.lock:
            written = before.changes()
        if written:
            detail = f"the forward keeps state on the model: {written[0].path}"
            self._owner.refuse(Reason.UNKNOWN_CLASS, detail)
        return not written

    def _keep(
        self,
        request: Request,
        space: bytes,
        tokens: Sequence[int],
        caches: Sequence[Any],
        history: Stops | None,
        kind: EntryKind,
    ) -> None:
        with self._owner.lock:
            snapshot = Snapshot.take(caches, len(tokens))
        inserted = self._owner.keep(space, TokenKey(tokens), Held(snapshot, history), kind)
        if inserted.entry is not None:
            request.inserted += inserted.entry.nbytes

    def _kept(
        self, start: int, count: int, ahead: Sequence[int], named: Sequence[int]
    ) -> dict[int, EntryKind]:
        """Return where to take snapshots; all are paid for before the first is taken.

        A stack that can be cut back needs the boundary only. The others can be taken up only where a snapshot is.
        """
        owner, last = self._owner, boundary_of(count, self._owner.policy)
        if last not in ahead:
            return {}
        costs = self.costs()
        if cuttable(costs.layers, last):
            return {last: EntryKind.PROMPT}

        def cost(position: int) -> int:
            return costs.at(position, last=owner.chunk)

        kept: dict[int, EntryKind] = {}
        left = self._most_bytes
        for stop in sorted({last, *(stop for stop in named if stop in ahead)}, reverse=True):
            if len(kept) < self._most and cost(stop) <= left:
                left -= cost(stop)
                kept[stop] = EntryKind.PROMPT
        grid = checkpoints(
            last + 1,
            lambda position: 0 if position in kept else cost(position),
            start=start,
            stride=owner.chunk,
            most=self._most - len(kept) + (last in kept),
            max_bytes=left,
        )
        return {position: EntryKind.CHECKPOINT for position in grid.positions if position in ahead} | kept

    def costs(self) -> Costs:
        """Return what snapshots of this model cost, from a lazy run that is never evaluated."""
        owner = self._owner
        with owner.lock:
            measured = self._measured
            if measured is None:
                before, caches = ModuleState(owner.model), owner.fresh()
                try:
                    owner.model(mx.zeros((1, _SAMPLE), mx.int32), cache=caches)
                    measured = self._measured = Costs.of(caches, _SAMPLE)
                finally:
                    before.restore()
            return measured


def cuttable(layers: Iterable[Layer], position: int) -> bool:
    """Return whether a stack whose layers are like these can be cut back from `position` to any shorter prefix."""
    for layer in layers:
        for _, part in layer.walk("layer"):
            limit = {"rotating": "max_size", "chunked": "chunk_size"}.get(part.kind)
            if part.kind == "arrays" or (limit is not None and position > part.parameters[limit]):
                return False
    return True
