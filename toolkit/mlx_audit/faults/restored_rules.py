"""What may go wrong around snapshots: rules that allow too much, positions unseen, arrays and containers shared."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx

from mlx_audit.faults.base import Patch, fault
from mlx_audit.faults.restored import without_guard
from mlx_audit.prefix import cache, layers_keyed, rules, session, snapshot
from mlx_audit.prefix.layers import Layer
from mlx_audit.prefix.layers_arrays import Recurrent
from mlx_audit.prefix.layers_keyed import Keyed
from mlx_audit.prefix.reasons import Reason


@fault("RST004", needs="arrays")
def snapshot_borrows_arrays(patch: Patch) -> None:
    """What is inserted is kept as it is, without a copy."""
    patch.setattr(snapshot, "copied", lambda array: array)


@fault("RST004")
def stored_arrays_handed_out(patch: Patch) -> None:
    """Whoever takes an entry up gets the stored arrays themselves."""
    patch.setattr(snapshot, "handle", lambda array: array)


@fault("RST004", needs="arrays")
def restored_container_shared(patch: Patch) -> None:
    """All who take up a recurrent state share one list of its arrays."""
    own, lists = Recurrent.make, dict[tuple[int, ...], list[Any]]()

    def make(self: Recurrent, layer: Layer, arrays: Sequence[mx.array]) -> Any:
        native = own(self, layer, list(arrays))
        native.cache = lists.setdefault(tuple(_marks(arrays)), native.cache)
        return native

    patch.setattr(Recurrent, "make", make)


@fault("RST005", needs="rotating")
def turned_ring_is_cut(patch: Patch) -> None:
    """A ring that has turned is cut by as many rows as tokens."""
    _allow(patch, Reason.WRAPPED_RING)


@fault("RST005", needs="arrays")
def recurrent_state_taken_up_anywhere(patch: Patch) -> None:
    """A recurrent state serves every shorter prefix, as if it could be ahead."""
    _allow(patch, Reason.RECURRENT_OFF_BOUNDARY)
    patch.setattr(
        Recurrent, "cut", lambda self, layer, arrays, prefix: (replace(layer, position=prefix), arrays)
    )


@fault("RST005", needs="chunked")
def chunk_is_cut_behind_its_rows(patch: Patch) -> None:
    """A chunked cache gives back as many tokens as it has rows, and says that it gave all."""
    _allow(patch, Reason.PARTIAL_TRIM, Reason.WINDOW_SLID)


@fault("RST005", needs="trims")
def cut_from_the_front(patch: Patch) -> None:
    """A cut drops the first rows instead of the last."""

    def cut(self: Keyed, layer: Layer, arrays: Any, prefix: int) -> Any:
        rows = layer.rows - (layer.position - prefix)
        arrays = [array[..., layer.rows - rows :, :] for array in arrays]
        forms = tuple(map(layers_keyed.ArrayForm.of, arrays))
        return replace(layer, position=prefix, forms=forms), arrays

    patch.setattr(Keyed, "cut", cut)


@fault("RST005")
def any_prefix_is_the_whole(patch: Patch) -> None:
    """A prefix that is no part of an entry gives the whole of it."""
    own = snapshot.refusal

    def refusal(layers: Any, prefix: int) -> Any:
        found = own(layers, prefix)
        return None if found is not None and found.reason is Reason.POSITION_MISMATCH else found

    def restore(self: Any, prefix: int | None = None) -> list[Any]:
        whole = prefix is None or not 0 < prefix <= self.position
        return restored(self, None if whole else prefix)  # type: ignore[no-any-return]

    restored = snapshot.Snapshot.restore
    patch.setattr(snapshot, "refusal", refusal)
    patch.setattr(snapshot.Snapshot, "restore", restore)


@fault("RST006", needs="slots")
def position_not_compared(patch: Patch) -> None:
    """What a layer says of its position is believed, whatever the key."""
    patch.setattr(layers_keyed, "require_position", lambda found, position, where: None)
    patch.setattr(Keyed, "check", lambda self, layer, where: None)


@fault("RST006")
def key_not_compared(patch: Patch) -> None:
    """The key is cut or lengthened to what the caches hold."""
    own = cache.PrefixCache.insert

    def insert(self: Any, tokens: Any, caches: Any, **options: Any) -> Any:
        position = options.get("position") or len(tokens)
        return own(self, [*tokens, *[0] * position][:position], caches, **options)

    patch.setattr(cache.PrefixCache, "insert", insert)


@fault("RST007")
def restored_without_its_suffix(patch: Patch) -> None:
    """A session takes over what was restored before the rest of its prompt was fed to it."""
    own = session.CachedSession._read_eagerly

    def read(self: Any, ids: mx.array) -> Any:
        row: Any = ids[0].tolist()
        with self._prefixes.restore(row) as taken:
            before = taken.caches
        logits, caches = own(self, ids)
        return logits, before if taken.plan.hit else caches

    patch.setattr(session.CachedSession, "_read_eagerly", read)


@fault("RST008")
def last_call_remembered(patch: Any) -> None:
    """The model adds a little of what it said last, to whomever it was."""
    model = patch.module.Model
    own, said = model.__call__, list[mx.array]()

    def call(self: Any, *inputs: Any, **options: Any) -> mx.array:
        logits: mx.array = own(self, *inputs, **options)
        before = said[-1:] or [mx.zeros_like(logits[:1, -1:])]
        said[:] = [logits[:1, -1:]]
        return logits + 0.01 * before[0].astype(logits.dtype)

    patch.setattr(model, "__call__", call)


def _allow(patch: Patch, *reasons: Reason) -> None:
    """Let layers be cut that refuse for these reasons, and nobody look at them afterwards."""
    own = rules._refusal_of

    def refusal_of(layer: Layer, prefix: int) -> Reason | None:
        found = own(layer, prefix)
        return None if found in reasons else found

    patch.setattr(rules, "_refusal_of", refusal_of)
    without_guard(patch)


def _marks(arrays: Sequence[mx.array]) -> list[int]:
    """Return what tells the arrays of one entry from those of another."""
    return [hash(bytes(memoryview(mx.view(mx.reshape(a, (-1,)), mx.uint8)))) for a in arrays]  # type: ignore[arg-type]
