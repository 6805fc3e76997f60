"""Caches of recurrent state, which count nothing, and caches that consist of others."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache, CacheList

from mlx_audit.prefix.layers import (
    ArrayForm,
    Arrays,
    Kind,
    Layer,
    kind_for,
    kinds,
    read_layer,
    require,
    require_one_row,
)
from mlx_audit.prefix.reasons import PrefixRefused, Reason


class Recurrent(Kind):
    """mlx-lm's `ArraysCache`: arrays of any shape, replaced by every token; a slot may stay empty."""

    kind = "arrays"
    native = ArraysCache
    attributes = frozenset({"cache", "left_padding", "lengths"})

    def read(self, native: Any, position: int, where: str) -> tuple[Layer, Arrays]:
        if native.left_padding is not None or native.lengths is not None:
            raise PrefixRefused(
                Reason.BATCHED,
                "the cache still counts the padding of a prompt",
                where=where,
                found=f"lengths {native.lengths}, left_padding {native.left_padding}",
                allowed="None: all tokens read so far were real",
                fix="call finalize() on the cache after the prompt, or prefill rows one by one",
            )
        slots: list[Any] = native.cache
        for array in slots:
            if array is not None and not isinstance(array, mx.array):
                raise PrefixRefused(
                    Reason.UNKNOWN_CLASS,
                    "a slot holds no array",
                    where=where,
                    found=type(array).__name__,
                    allowed="arrays, or None",
                )
        arrays: Arrays = [array for array in slots if array is not None]
        require_one_row(arrays, where)
        forms = tuple(None if array is None else ArrayForm.of(array) for array in slots)
        return Layer(self.kind, position, {}, forms), arrays

    def check(self, layer: Layer, where: str) -> None:
        super().check(layer, where)
        require(bool(layer.leaves), "the state is empty", where, f"a key of {layer.position} tokens")

    def cut(self, layer: Layer, arrays: Arrays, prefix: int) -> tuple[Layer, Arrays]:
        raise PrefixRefused(Reason.RECURRENT_OFF_BOUNDARY, found=prefix, allowed=layer.position)

    def make(self, layer: Layer, arrays: Arrays) -> Any:
        native: Any = ArraysCache(len(layer.forms))
        given = iter(arrays)
        native.cache = [None if form is None else next(given) for form in layer.forms]
        return native

    def position(self, native: Any) -> int | None:
        return None


class Composite(Kind):
    """mlx-lm's `CacheList`, of any depth; its parts are all at one position."""

    kind = "composite"
    native = CacheList
    attributes = frozenset({"caches"})

    def read(self, native: Any, position: int, where: str) -> tuple[Layer, Arrays]:
        read = [
            read_layer(part, position, f"{where} part {index}") for index, part in enumerate(native.caches)
        ]
        parts = tuple(layer for layer, _ in read)
        return Layer(self.kind, position, parts=parts), [array for _, arrays in read for array in arrays]

    def check(self, layer: Layer, where: str) -> None:
        super().check(layer, where)
        require(bool(layer.parts), "a composite cache has parts", where, layer.parts)
        for part in layer.parts:
            require(part.position == layer.position, "parts are at one position", where, part.position)

    def cut(self, layer: Layer, arrays: Arrays, prefix: int) -> tuple[Layer, Arrays]:
        cut = [kinds()[part.kind].cut(part, own, prefix) for part, own in shared_out(layer, arrays)]
        parts = tuple(part for part, _ in cut)
        return replace(layer, position=prefix, parts=parts), [array for _, own in cut for array in own]

    def make(self, layer: Layer, arrays: Arrays) -> Any:
        return CacheList(*(kinds()[part.kind].make(part, own) for part, own in shared_out(layer, arrays)))

    def position(self, native: Any) -> int | None:
        found = {kind_for(part, "part").position(part) for part in native.caches} - {None}
        require(len(found) <= 1, "parts are at one position", "composite cache", sorted(map(str, found)))
        return next(iter(found), None)


def shared_out(layer: Layer, arrays: Arrays) -> Iterator[tuple[Layer, Arrays]]:
    """Yield each part of a layer with its own arrays."""
    start = 0
    for part in layer.parts:
        end = start + len(part.leaves)
        yield part, arrays[start:end]
        start = end


KINDS: tuple[Kind, ...] = (Recurrent(), Composite())
