"""A snapshot: the caches of all layers at one position, copied when taken and when given back."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_audit.caches import handle
from mlx_audit.prefix.layers import ArrayForm, Arrays, Layer, copied, kind_for, kinds, read_layer
from mlx_audit.prefix.reasons import PrefixRefused, Reason
from mlx_audit.prefix.rules import refusal


class Snapshot:
    """The native caches of a whole stack after `position` tokens, in normal form; it never changes.

    Its arrays lie in buffers of their own, of the rows that count. What `restore` gives back reads the same buffers
    through other handles: MLX copies a shared buffer before it writes to it, and every native cache writes, or
    concatenates, at its first update. So a restore costs the one copy that its first update makes.

    Attributes:
        position: Tokens that every layer has taken in: the length of the key.
        layers: One for each native cache.
    """

    def __init__(self, position: int, layers: Sequence[Layer], arrays: Sequence[mx.array]) -> None:
        """Make a snapshot of evaluated arrays that nobody else writes to; `take` copies those of live caches.

        Args:
            position: Tokens.
            layers: One for each native cache.
            arrays: Of all layers, in the order of their `leaves`.

        Raises:
            PrefixRefused: the layers contradict the position, the arrays, or themselves.
        """
        check_layers(layers, position)
        wanted = [form for layer in layers for form in layer.leaves]
        found = [ArrayForm.of(array) for array in arrays]
        if found != wanted:
            raise PrefixRefused(
                Reason.DAMAGED, "the arrays are not those stated", found=found, allowed=wanted
            )
        self.position = position
        self.layers = tuple(layers)
        self._arrays = tuple(arrays)

    @classmethod
    def take(cls, caches: Sequence[Any], position: int) -> Snapshot:
        """Copy the caches of a stack that has taken in `position` tokens.

        Raises:
            PrefixRefused: unknown-class, batched, or position-mismatch; nothing was copied.
        """
        layers, arrays = read_stack(caches, position)
        own = [copied(array) for array in arrays]
        mx.eval(own)
        return cls(position, layers, own)

    @property
    def nbytes(self) -> int:
        """Bytes of its arrays."""
        return sum(layer.nbytes for layer in self.layers)

    @property
    def leaves(self) -> list[tuple[int, int]]:
        """Identity and bytes of each array, for a budget that counts every buffer once."""
        return [(id(array), array.nbytes) for array in self._arrays]

    @property
    def arrays(self) -> dict[str, mx.array]:
        """Handles of all arrays by place, such as `layer 0 keys`; writing to one does not reach the snapshot."""
        return dict(zip(leaf_names(self.layers), map(handle, self._arrays), strict=True))

    def digest(self) -> str:
        """Return a digest of every byte, which tells whether anybody wrote to it."""
        total = hashlib.sha256(repr((self.position, self.layers)).encode())
        for array in self._arrays:
            total.update(leaf_bytes(array))
        return total.hexdigest()

    def restore(self, prefix: int | None = None) -> list[Any]:
        """Return new native caches after `prefix` tokens, by default all.

        Raises:
            PrefixRefused: a layer cannot be taken up there; the reason is the rule's. Nothing was made.
        """
        prefix = self.position if prefix is None else prefix
        refused = refusal(self.layers, prefix)
        if refused is not None:
            raise PrefixRefused(refused.reason, where=refused.where, found=prefix, allowed=self.position)
        arrays = [handle(array) for array in self._arrays]
        made: list[tuple[Layer, Arrays]] = []
        start = 0
        for layer in self.layers:
            end = start + len(layer.leaves)
            own = arrays[start:end]
            made.append(
                (layer, own) if prefix == self.position else kinds()[layer.kind].cut(layer, own, prefix)
            )
            start = end
        # Evaluated here: views are free, and a thread may not evaluate what another has left lazy.
        mx.eval([own for _, own in made])
        caches = [kinds()[layer.kind].make(layer, own) for layer, own in made]
        require_restored(caches, [layer for layer, _ in made], prefix)
        return caches


def cost(caches: Sequence[Any], position: int) -> int:
    """Return the bytes that `Snapshot.take` would need, without copying or evaluating anything.

    Raises:
        PrefixRefused: it would be refused, for the same reason.
    """
    layers, _ = read_stack(caches, position)
    return sum(layer.nbytes for layer in layers)


def read_stack(caches: Sequence[Any], position: int) -> tuple[list[Layer], Arrays]:
    """Return the normal form of live caches; the arrays are lazy and share their buffers.

    Raises:
        PrefixRefused: unknown-class, batched, or position-mismatch.
    """
    require_length(position)
    read = [read_layer(cache, position, f"layer {index}") for index, cache in enumerate(caches)]
    layers = [layer for layer, _ in read]
    check_layers(layers, position)
    return layers, [array for _, arrays in read for array in arrays]


def check_layers(layers: Sequence[Layer], position: int) -> None:
    """Refuse layers of another position, or that contradict themselves."""
    require_length(position)
    if not any(layer.leaves for layer in layers):
        raise PrefixRefused(Reason.POSITION_MISMATCH, "the stack holds no arrays", found=0, allowed=position)
    for index, stored in enumerate(layers):
        for where, layer in stored.walk(f"layer {index}"):
            if layer.position != position:
                raise PrefixRefused(
                    Reason.POSITION_MISMATCH, where=where, found=layer.position, allowed=position
                )
            kinds()[layer.kind].check(layer, where)


def require_length(position: int) -> None:
    """Refuse a position at which there is nothing to keep."""
    if position < 1:
        raise PrefixRefused(
            Reason.BELOW_MINIMUM, "an empty prefix needs no snapshot", found=position, allowed="1 or more"
        )


def require_restored(caches: Sequence[Any], layers: Sequence[Layer], prefix: int) -> None:
    """Refuse restored caches that don't say of themselves what was planned."""
    for index, (cache, layer) in enumerate(zip(caches, layers, strict=True)):
        where = f"layer {index}"
        counted = kind_for(cache, where).position(cache)
        found, _ = read_layer(cache, prefix, where)
        if counted not in (None, prefix) or found != layer:
            raise PrefixRefused(Reason.POSITION_MISMATCH, where=where, found=found, allowed=layer)


def leaf_names(layers: Sequence[Layer]) -> list[str]:
    """Return a name for each array of a stack, such as `layer 3 part 1 keys`."""
    return [
        f"{where} {name}"
        for index, stored in enumerate(layers)
        for where, layer in stored.walk(f"layer {index}")
        for name in kinds()[layer.kind].array_names(layer)
    ]


def leaf_bytes(array: mx.array) -> bytes:
    """Return the bytes of an array of any dtype."""
    flat = mx.reshape(array, (-1,))
    return np.array(mx.view(flat, mx.uint8) if flat.size else flat.astype(mx.uint8)).tobytes()
