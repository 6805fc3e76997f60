"""What goes into a prefix cache and what comes out: arguments, checked, and what a request starts with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from mlx_audit.errors import ShapeMismatch
from mlx_audit.prefix.fingerprint import Fingerprint, Value
from mlx_audit.prefix.grid import Stops
from mlx_audit.prefix.layers import kind_for
from mlx_audit.prefix.plan import Plan, Policy
from mlx_audit.prefix.radix_key import TokenKey
from mlx_audit.prefix.reasons import PrefixRefused, Reason

Namespace = Mapping[str, Value]
"""Fields of `Fingerprint`, such as `{"tenant": "a", "media": (digest,)}`."""


@dataclass(frozen=True)
class Taken:
    """What a request starts with.

    Attributes:
        caches: The live request cache: of the model's own classes and settings, for this request alone.
        suffix: Tokens to feed, one or more.
        plan: How many tokens the caches hold, and why not more.
        refused: Longer prefixes that were refused, each with its reason.
        stops: Where the chunks ended that made them; None: not known.
    """

    caches: list[Any]
    suffix: list[int]
    plan: Plan
    refused: tuple[Plan, ...]
    stops: Stops | None


def require_sizes(**sizes: tuple[Any, int]) -> None:
    """Refuse a size that is no integer from its least value on."""
    for name, (value, least) in sizes.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ShapeMismatch(
                "a size is not usable", where=name, found=value, allowed=f"an integer from {least}"
            )


def require_policy(policy: object) -> None:
    """Refuse a policy that there is not."""
    if policy not in list(Policy):
        raise ShapeMismatch("no such policy", where="policy", found=policy, allowed=", ".join(Policy))


def require_position(key: TokenKey, caches: Sequence[Any], position: int | None) -> None:
    """Refuse a stack whose position nobody vouches for, or for which somebody vouches another one.

    Layers that count their tokens are compared with the key when the snapshot is taken. Recurrent ones count nothing:
    beside such a layer they are believed, alone they are not.
    """
    counts = {kind_for(cache, f"layer {index}").position(cache) for index, cache in enumerate(caches)}
    if position is None and not counts - {None}:
        raise PrefixRefused(
            Reason.POSITION_MISMATCH,
            "no layer of this stack counts its tokens",
            where="insert(position)",
            allowed=f"{len(key)}, the length of the key, said by whoever fed the stack",
        )
    if position not in (None, len(key)):
        raise PrefixRefused(
            Reason.POSITION_MISMATCH, where="insert(position)", found=position, allowed=len(key)
        )


def stated(namespace: Namespace | None) -> dict[str, Any]:
    """Return the fields of a namespace.

    Raises:
        ShapeMismatch: one is no field of a fingerprint.
    """
    known = {field.name for field in fields(Fingerprint)}
    unknown = sorted(set(namespace or {}) - known)
    if unknown:
        raise ShapeMismatch(
            "no such field of a fingerprint",
            where="namespace",
            found=", ".join(unknown),
            allowed=", ".join(sorted(known)),
        )
    return dict(namespace or {})
