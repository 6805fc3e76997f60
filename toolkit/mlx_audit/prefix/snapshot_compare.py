"""Compare two stacks leaf by leaf, bit by bit: the oracle of every restore.

Logits are a weak oracle. A recurrent state that is three tokens old moves them at the next token, and not any more
thirty tokens later, while the state still differs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from mlx_audit.caches import host_float
from mlx_audit.prefix.layers import Layer
from mlx_audit.prefix.snapshot import leaf_bytes, leaf_names, read_stack


@dataclass(frozen=True)
class Difference:
    """One thing that differs.

    Attributes:
        where: Such as `layer 2 part 0 keys`.
        found, wanted: What differs, as text: a form, a cursor, or the largest distance of two arrays.
    """

    where: str
    found: str
    wanted: str


def differences(found: Sequence[Any], wanted: Sequence[Any], position: int) -> list[Difference]:
    """Return where two stacks of native caches differ after `position` tokens; [] if they are equal in every bit.

    Args:
        found: Restored caches.
        wanted: Those of a cold run on the same chunk grid.
        position: Tokens that both have taken in.

    Raises:
        PrefixRefused: one of them is no sound stack at this position.
    """
    left, left_arrays = read_stack(found, position)
    right, right_arrays = read_stack(wanted, position)
    stated = _stated(left, right)
    if stated:
        return stated
    pairs = zip(leaf_names(right), left_arrays, right_arrays, strict=True)
    return [
        Difference(where, f"differs by {_distance(a, b):.3g}", "the same bits")
        for where, a, b in pairs
        if leaf_bytes(a) != leaf_bytes(b)
    ]


def _stated(left: Sequence[Layer], right: Sequence[Layer]) -> list[Difference]:
    """Return what the layers say differently of themselves: kinds, cursors, forms."""
    if len(left) != len(right):
        return [Difference("stack", f"{len(left)} layers", f"{len(right)} layers")]
    found = []
    for index, (one, other) in enumerate(zip(left, right, strict=True)):
        if one != other:
            found.append(Difference(f"layer {index}", str(one), str(other)))
    return found


def _distance(left: mx.array, right: mx.array) -> float:
    """Return the largest absolute difference of two arrays of one form."""
    return host_float(mx.abs(left.astype(mx.float32) - right.astype(mx.float32)).max())
