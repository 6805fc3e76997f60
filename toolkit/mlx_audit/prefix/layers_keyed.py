"""Caches of keys and values, a row a token: linear, concatenated, quantized, rotating, chunked."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

import mlx.core as mx
from mlx_lm.models.cache import (
    ChunkedKVCache,
    ConcatenateKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
)

from mlx_audit.prefix.layers import ArrayForm, Arrays, Kind, Layer, require, require_one_row, require_position

_AXES = 4
_TIME = -2


class Keyed(Kind):
    """Arrays `[1, heads, rows, width]`, all of as many rows."""

    slots: ClassVar[tuple[str, ...]] = ("keys", "values")

    def read(self, native: Any, position: int, where: str) -> tuple[Layer, Arrays]:
        require(native.keys is not None, "the cache is empty", where, f"a key of {position} tokens")
        require_position(int(native.offset), position, where)
        buffers = self._buffers(native)
        require_one_row(buffers, where)
        for buffer in buffers:
            require(buffer.ndim == _AXES, "keys and values have four axes", where, buffer.shape)
        arrays = self._valid(native, buffers, where)
        names = (*self.settings, *self.counters)
        parameters = {name: int(getattr(native, name)) for name in names}
        if "_idx" in parameters:  # a ring in order, shortened
            parameters["_idx"] = min(parameters["_idx"], arrays[0].shape[_TIME])
        return Layer(self.kind, position, parameters, tuple(map(ArrayForm.of, arrays))), arrays

    def check(self, layer: Layer, where: str) -> None:
        super().check(layer, where)
        self._check_parameters(layer, where)
        held = self._held(layer)
        for form in layer.forms:
            sound = form is not None and len(form.shape) == _AXES and form.shape[_TIME] == held
            require(sound, f"keys and values hold {held} rows", where, form)

    def cut(self, layer: Layer, arrays: Arrays, prefix: int) -> tuple[Layer, Arrays]:
        rows = layer.rows - (layer.position - prefix)
        arrays = [array[..., :rows, :] for array in arrays]
        parameters = {**layer.parameters, **({"_idx": rows} if "_idx" in layer.parameters else {})}
        forms = tuple(map(ArrayForm.of, arrays))
        return replace(layer, position=prefix, parameters=parameters, forms=forms), arrays

    def make(self, layer: Layer, arrays: Arrays) -> Any:
        native = self._empty(layer)
        native.keys, native.values = arrays
        native.offset = layer.position
        return native

    def position(self, native: Any) -> int | None:
        return int(native.offset)

    def _buffers(self, native: Any) -> Arrays:
        return [native.keys, native.values]

    def _valid(self, native: Any, buffers: Sequence[mx.array], where: str) -> Arrays:
        """Return the rows that count, in the order in which the class keeps them."""
        rows = min(buffer.shape[_TIME] for buffer in buffers)
        require(rows >= native.offset, "fewer rows than tokens", where, f"{rows} for {native.offset}")
        return [buffer[..., : native.offset, :] for buffer in buffers]

    def _held(self, layer: Layer) -> int:
        """Return the rows that a layer of this position and these parameters has."""
        return layer.position

    def _check_parameters(self, layer: Layer, where: str) -> None:
        """Refuse parameters that contradict each other or the position."""

    @abstractmethod
    def _empty(self, layer: Layer) -> Any: ...


class Linear(Keyed):
    """mlx-lm's `KVCache`."""

    kind = "linear"
    native = KVCache
    attributes = frozenset({"keys", "values", "offset"})

    def _empty(self, layer: Layer) -> Any:
        return KVCache()


class Concatenated(Keyed):
    """mlx-lm's `ConcatenateKVCache`, whose own `trim` forgets to cut the arrays."""

    kind = "concatenated"
    native = ConcatenateKVCache
    attributes = frozenset({"keys", "values", "offset"})

    def _empty(self, layer: Layer) -> Any:
        return ConcatenateKVCache()


class Quantized(Keyed):
    """mlx-lm's `QuantizedKVCache`: packed numbers, scales and biases, of keys and of values."""

    kind = "quantized"
    native = QuantizedKVCache
    attributes = frozenset({"keys", "values", "offset", "group_size", "bits"})
    settings = ("group_size", "bits")
    slots = tuple(f"{of}.{part}" for of in ("keys", "values") for part in ("packed", "scales", "biases"))

    def make(self, layer: Layer, arrays: Arrays) -> Any:
        native = self._empty(layer)
        native.keys, native.values = arrays[:3], arrays[3:]
        native.offset = layer.position
        return native

    def _check_parameters(self, layer: Layer, where: str) -> None:
        require(layer.parameters["bits"] in (2, 3, 4, 5, 6, 8), "bits of a number", where, layer.parameters)
        require(layer.parameters["group_size"] > 0, "numbers in a group", where, layer.parameters)

    def _buffers(self, native: Any) -> Arrays:
        return [*native.keys, *native.values]

    def _empty(self, layer: Layer) -> Any:
        return QuantizedKVCache(layer.parameters["group_size"], layer.parameters["bits"])


class Rotating(Keyed):
    """mlx-lm's `RotatingKVCache`.

    Its buffer has one of three forms: in order and not yet full; in order with more rows than the window, after a
    chunk; or a full ring with the cursor `_idx` inside. Of the second the next token drops the oldest rows (never the
    kept ones), so the normal form drops them, too. The third is kept as it lies, the cursor with it.
    """

    kind = "rotating"
    native = RotatingKVCache
    attributes = frozenset({"keys", "values", "offset", "keep", "max_size", "_idx"})
    settings = ("max_size", "keep")
    counters = ("_idx",)

    def make(self, layer: Layer, arrays: Arrays) -> Any:
        native = super().make(layer, arrays)
        native._idx = layer.parameters["_idx"]
        return native

    def _check_parameters(self, layer: Layer, where: str) -> None:
        size, keep, cursor = (layer.parameters[name] for name in ("max_size", "keep", "_idx"))
        require(0 <= keep < size, "fewer tokens are kept than there are rows", where, layer.parameters)
        least = layer.rows if layer.position <= size else keep
        require(least <= cursor <= layer.rows, "the cursor is not where the next token goes", where, cursor)

    def _valid(self, native: Any, buffers: Sequence[mx.array], where: str) -> Arrays:
        rows, size, keep = buffers[0].shape[_TIME], native.max_size, native.keep
        offset, cursor = int(native.offset), int(native._idx)
        if cursor == offset <= rows:
            buffers = [buffer[..., :cursor, :] for buffer in buffers]
            rows = cursor
        in_order = cursor == rows
        sound = in_order if rows != size else keep <= cursor <= rows
        require(
            sound and rows >= min(offset, size),
            "the ring's cursor, rows and offset contradict each other",
            where,
            f"cursor {cursor}, rows {rows}, offset {offset}, window {size}, keep {keep}",
        )
        surplus = rows - size
        if surplus > 0:
            buffers = [
                mx.concatenate([b[..., :keep, :], b[..., surplus + keep :, :]], axis=_TIME) for b in buffers
            ]
        return list(buffers)

    def _held(self, layer: Layer) -> int:
        return min(layer.position, layer.parameters["max_size"])

    def _empty(self, layer: Layer) -> Any:
        return RotatingKVCache(layer.parameters["max_size"], layer.parameters["keep"])


class Chunked(Keyed):
    """mlx-lm's `ChunkedKVCache`: the rows from `start_position` on.

    Which rows are left depends on the chunks that were fed, and the model drops more before its next forward.
    """

    kind = "chunked"
    native = ChunkedKVCache
    attributes = frozenset({"keys", "values", "offset", "chunk_size", "start_position"})
    settings = ("chunk_size",)
    counters = ("start_position",)

    def make(self, layer: Layer, arrays: Arrays) -> Any:
        native = super().make(layer, arrays)
        native.start_position = layer.parameters["start_position"]
        return native

    def _check_parameters(self, layer: Layer, where: str) -> None:
        start, size = layer.parameters["start_position"], layer.parameters["chunk_size"]
        require(
            0 <= start < layer.position and size > 0, "the rows begin at a token", where, layer.parameters
        )

    def _valid(self, native: Any, buffers: Sequence[mx.array], where: str) -> Arrays:
        rows, held = buffers[0].shape[_TIME], native.offset - native.start_position
        require(0 < held <= rows, "fewer rows than tokens", where, f"{rows} for {held}")
        return [buffer[..., :held, :] for buffer in buffers]

    def _held(self, layer: Layer) -> int:
        return layer.position - layer.parameters["start_position"]

    def _empty(self, layer: Layer) -> Any:
        return ChunkedKVCache(layer.parameters["chunk_size"])


KINDS: tuple[Kind, ...] = (Linear(), Concatenated(), Quantized(), Rotating(), Chunked())
