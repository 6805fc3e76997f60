"""Where to take snapshots inside a prefill, and what each will cost, known before any is taken."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from mlx_audit.prefix.layers import Layer
from mlx_audit.prefix.snapshot import read_stack


@dataclass(frozen=True)
class Costs:
    """What snapshots of a stack cost at any position, from one stack that has taken in a token or more.

    The sample may be lazy: forms are read, never values.

    Attributes:
        layers: Of the sample, parts in place of what they are part of.
    """

    layers: tuple[Layer, ...]

    @classmethod
    def of(cls, caches: Sequence[Any], position: int) -> Costs:
        """Measure native caches that have taken in `position` tokens, no fewer than a convolution looks back.

        Raises:
            PrefixRefused: they would be refused as a snapshot.
        """
        layers, _ = read_stack(caches, position)
        inner = (part for layer in layers for _, part in layer.walk("layer") if part.forms)
        return cls(tuple(inner))

    def at(self, position: int, *, last: int = 1) -> int:
        """Return the bytes of a snapshot after `position` tokens.

        Args:
            position: Tokens.
            last: Tokens of the last forward; chunked caches drop rows before a forward, not after it.
        """
        return sum(_bytes_at(layer, position, last) for layer in self.layers)


@dataclass(frozen=True)
class Checkpoints:
    """Positions at which a prefill stops to take a snapshot.

    Attributes:
        positions: Ascending; the last is the boundary, one token before the end of the prompt.
        nbytes: Of all these snapshots together.
        dropped: How many grid positions the limits left out.
    """

    positions: tuple[int, ...]
    nbytes: int
    dropped: int = 0


def checkpoints(
    length: int,
    cost: Callable[[int], int],
    *,
    start: int = 0,
    stride: int = 256,
    most: int = 8,
    max_bytes: int | None = None,
) -> Checkpoints:
    """Return where to take snapshots while a prompt is read.

    Grid positions are multiples of the stride from the start of the text, so that prompts which share a prefix share
    them, too. Where the limits allow fewer, the stride doubles; the boundary is given up last.

    Args:
        length: Tokens of the prompt.
        cost: Bytes of a snapshot at a position, such as `Costs.at`.
        start: Tokens already there, restored.
        stride: Tokens between grid positions.
        most: Snapshots in all.
        max_bytes: Of all snapshots together; None: no limit.
    """
    boundary = length - 1
    if boundary <= start or most < 1 or stride < 1:
        return Checkpoints((), 0)
    wanted = _on_grid(start, boundary, stride)
    while True:
        chosen = (*_on_grid(start, boundary, stride), boundary)
        nbytes = sum(map(cost, chosen))
        if len(chosen) <= most and (max_bytes is None or nbytes <= max_bytes):
            return Checkpoints(chosen, nbytes, len(wanted) + 1 - len(chosen))
        if len(chosen) == 1:
            return Checkpoints((), 0, len(wanted) + 1)
        stride *= 2


def _on_grid(start: int, boundary: int, stride: int) -> range:
    """Return the grid positions strictly between two positions."""
    return range(start - start % stride + stride, boundary, stride)


def _bytes_at(layer: Layer, position: int, last: int) -> int:
    """Return the bytes of one layer that is no composite."""
    if layer.kind == "arrays":
        return layer.nbytes
    rows = position
    if layer.kind == "rotating":
        rows = min(position, layer.parameters["max_size"])
    elif layer.kind == "chunked":
        rows = position - max(0, position - last - layer.parameters["chunk_size"])
    return layer.nbytes // layer.rows * rows
