"""What may go wrong with a snapshot on its way in and out: old states, lost cursors, the wrong layer, lost arrays.

Guards that would refuse the defect are taken out with it, so that what sees it is the comparison of states.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache

from mlx_audit.faults.base import Patch, fault
from mlx_audit.prefix import layers_arrays, snapshot, store, store_body
from mlx_audit.prefix.layers import Layer
from mlx_audit.prefix.layers_arrays import Composite, Recurrent
from mlx_audit.prefix.layers_keyed import Chunked, Keyed, Rotating
from mlx_audit.prefix.snapshot import Snapshot


def without_guard(patch: Patch) -> None:
    """Restored caches are handed out unseen."""
    patch.setattr(snapshot, "require_restored", lambda caches, layers, prefix: None)


def _one_write_behind(patch: Patch) -> None:
    """Read recurrent states as they were before their last update."""
    own_set, own_read = ArraysCache.__setitem__, Recurrent.read

    def setitem(self: Any, index: int, value: Any) -> None:
        vars(self).setdefault("_before", {})[index] = self.cache[index]
        own_set(self, index, value)

    def read(self: Recurrent, native: Any, position: int, where: str) -> Any:
        before = vars(native).get("_before", {})
        old = ArraysCache(len(native.cache))
        old.cache = [
            array if before.get(index) is None else before[index] for index, array in enumerate(native.cache)
        ]
        return own_read(self, old, position, where)

    patch.setattr(Recurrent, "attributes", frozenset({*Recurrent.attributes, "_before"}))
    patch.setattr(layers_arrays.Recurrent, "read", read)
    patch.setattr(ArraysCache, "__setitem__", setitem)


def _lenient(patch: Patch) -> None:
    """A cache with an attribute more or less is none of an unknown class."""
    from mlx_audit.prefix import layers

    own = layers.kind_for

    def kind_for(native: object, where: str) -> Any:
        found = next((kind for kind in layers.kinds().values() if kind.native is type(native)), None)
        return found or own(native, where)

    for module in (layers, layers_arrays, snapshot):
        patch.setattr(module, "kind_for", kind_for)
    without_guard(patch)


@fault("RST001", needs="arrays")
def restored_three_tokens_old(patch: Patch) -> None:
    """The recurrent state is the one before the last chunk of the prompt, three tokens old."""
    _lenient(patch)
    _one_write_behind(patch)


@fault("RST002", needs="arrays")
def restored_one_token_old(patch: Patch) -> None:
    """The recurrent state is the one before the last token."""
    _lenient(patch)
    _one_write_behind(patch)


@fault("RST001", needs="alike")
def restored_from_another_layer(patch: Patch) -> None:
    """The first two layers get each other's arrays."""
    own = Snapshot.restore

    def restore(self: Snapshot, prefix: int | None = None) -> list[Any]:
        caches = own(self, prefix)
        return [caches[1], caches[0], *caches[2:]]

    patch.setattr(Snapshot, "restore", restore)


@fault("RST001", needs="arrays")
def restored_states_reset(patch: Patch) -> None:
    """Recurrent states start anew, as if a reset were a way to step back."""
    own = Recurrent.make

    def make(self: Recurrent, layer: Layer, arrays: Sequence[mx.array]) -> Any:
        return own(self, layer, [array * 0 for array in arrays])

    patch.setattr(Recurrent, "make", make)


@fault("RST001", needs="slots")
def restored_position_one_late(patch: Patch) -> None:
    """Keyed caches say one token more than they hold, so that the next is rotated wrongly."""
    own = Snapshot.restore

    def restore(self: Snapshot, prefix: int | None = None) -> list[Any]:
        caches = own(self, prefix)
        for native in _parts(caches):
            if hasattr(native, "offset"):
                native.offset += 1
        return caches

    patch.setattr(Snapshot, "restore", restore)


@fault("RST001", needs="linear")
def restored_without_the_last_row(patch: Patch) -> None:
    """The keys and values of the last token are those of the one before."""
    own = Keyed.make

    def make(self: Keyed, layer: Layer, arrays: Any) -> Any:
        own_rows = [mx.concatenate([a[..., :-1, :], a[..., -2:-1, :]], axis=-2) for a in arrays]
        return own(self, layer, own_rows)

    patch.setattr(Keyed, "make", make)


@fault("RST001", needs="linear")
def restored_values_as_keys(patch: Patch) -> None:
    """Keys and values change places."""
    own = Keyed.make
    patch.setattr(Keyed, "make", lambda self, layer, arrays: own(self, layer, arrays[::-1]))
    without_guard(patch)


@fault("RST001", needs="rotating")
def snapshot_keeps_the_oldest_rows(patch: Patch) -> None:
    """Of a ring with more rows than its window the latest are dropped."""
    own = Rotating._valid

    def valid(self: Rotating, native: Any, buffers: Sequence[mx.array], where: str) -> list[mx.array]:
        found = own(self, native, buffers, where)
        surplus = buffers[0].shape[2] - native.max_size
        if surplus <= 0 or int(native._idx) < buffers[0].shape[2]:
            return found
        return [buffer[..., : native.max_size, :] for buffer in buffers]

    patch.setattr(Rotating, "_valid", valid)
    without_guard(patch)


@fault("RST001", needs="chunked")
def chunk_start_forgotten(patch: Patch) -> None:
    """Chunked rows are taken for those from the start of the text on."""
    own = Chunked.make

    def make(self: Chunked, layer: Layer, arrays: Any) -> Any:
        native = own(self, layer, arrays)
        native.start_position = 0
        return native

    patch.setattr(Chunked, "make", make)
    without_guard(patch)


@fault("RST001", needs="composite")
def composite_restored_in_part(patch: Patch) -> None:
    """Of a composite cache the first part is left empty."""
    own = Composite.make

    def make(self: Composite, layer: Layer, arrays: Any) -> Any:
        native = own(self, layer, [array * 0 for array in arrays])
        whole = own(self, layer, arrays)
        native.caches = (native.caches[0], *whole.caches[1:])
        return native

    patch.setattr(Composite, "make", make)


@fault("RST002", needs="rotating")
def restored_cursor_one_late(patch: Patch) -> None:
    """The cursor of a ring that has turned is one row further on."""
    own = Rotating.make

    def make(self: Rotating, layer: Layer, arrays: Any) -> Any:
        native = own(self, layer, arrays)
        native._idx += native._idx < layer.rows
        return native

    patch.setattr(Rotating, "make", make)
    without_guard(patch)


@fault("RST002", needs="rotating")
def restored_cursor_at_the_end(patch: Patch) -> None:
    """A ring that has turned is taken up as if its rows were in order."""
    own = Rotating.make

    def make(self: Rotating, layer: Layer, arrays: Any) -> Any:
        native = own(self, layer, arrays)
        native._idx = layer.rows
        return native

    patch.setattr(Rotating, "make", make)
    without_guard(patch)


@fault("RST002", needs="keep")
def restored_without_what_is_kept(patch: Patch) -> None:
    """A ring no longer knows how many of the first tokens it keeps."""
    own = Rotating.make

    def make(self: Rotating, layer: Layer, arrays: Any) -> Any:
        native = own(self, layer, arrays)
        native.keep = 0
        return native

    patch.setattr(Rotating, "make", make)
    without_guard(patch)


@fault("RST003")
def stored_in_half_precision(patch: Patch) -> None:
    """The last bits of every number are lost on the way into the file."""
    own = store_body.write_body

    def write_body(path: Any, arrays: Sequence[mx.array]) -> None:
        own(path, [_halved(array) for array in arrays])

    patch.setattr(store, "write_body", write_body)


@fault("RST003", needs="rotating")
def stored_without_cursor(patch: Patch) -> None:
    """The file says of every ring that its rows are in order."""
    own = store._save_body

    def save_body(folder: Any, key: bytes, snapshot: Snapshot) -> Any:
        stated = own(folder, key, snapshot)
        return replace(stated, layers=tuple(map(_in_order, stated.layers)))

    patch.setattr(store, "_save_body", save_body)


def _parts(caches: Sequence[Any]) -> Iterator[Any]:
    """Yield native caches, and of composite ones their parts."""
    for native in caches:
        yield from _parts(native.caches) if hasattr(native, "caches") else [native]


def _in_order(layer: Layer) -> Layer:
    """Return a layer whose cursor is at the end of its rows."""
    if "_idx" not in layer.parameters:
        return layer
    return replace(layer, parameters={**layer.parameters, "_idx": layer.rows})


def _halved(array: mx.array) -> mx.array:
    """Return an array of the same form with the digits that bfloat16 keeps; of integers, every second bit."""
    if mx.issubdtype(array.dtype, mx.floating):
        short = mx.float16 if array.dtype == mx.bfloat16 else mx.bfloat16
        return array.astype(short).astype(array.dtype)
    return array & 0x55555555
