"""Which state may go through a compiled step: lists of arrays, and nothing that MLX would drop without a word."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import mlx.core as mx

from mlx_audit.caches import FixedCapacityCache
from mlx_audit.errors import HostState


def check_state_tree(tree: Any, *, name: str = "state") -> None:
    """Refuse a state layout that `mx.compile` would not carry.

    MLX walks lists, tuples and dicts; the outermost must be mutable, so that outputs can be put back. Every other
    object is dropped without an error, and whatever it holds is frozen into the graph.

    Raises:
        HostState: names the path of the first leaf that would be lost.
    """
    if not isinstance(tree, list | dict):
        raise HostState(
            "the outermost container of a state cannot be written back",
            where=name,
            found=type(tree).__name__,
            allowed="a list or a dict of arrays",
            fix=f"use list({name})",
        )
    for path, leaf in _leaves(tree, name):
        if not isinstance(leaf, mx.array):
            raise HostState(
                "a leaf of the state is not an array, so the compiled graph would freeze it",
                where=path,
                found=f"{type(leaf).__module__}.{type(leaf).__qualname__}",
                allowed="mx.array, in lists, tuples or dicts",
                fix="keep it as an mx.array in the state",
            )


def require_fixed_capacity(caches: Sequence[Any]) -> None:
    """Refuse caches whose position is host state, mlx-lm's own classes first of all.

    Raises:
        HostState: names the class and the attribute, such as `KVCache.offset`.
    """
    for index, cache in enumerate(caches):
        if not isinstance(cache, FixedCapacityCache):
            offset = getattr(cache, "offset", None)
            held = (
                f", {type(cache).__name__}.offset is {type(offset).__name__} {offset}"
                if offset is not None
                else ""
            )
            raise HostState(
                "position is host state: a compiled step would write every token into the same slot",
                where=f"caches[{index}]: {type(cache).__name__}.offset",
                found=f"{type(cache).__module__}.{type(cache).__qualname__}{held}",
                allowed="a FixedCapacityCache, whose position is an array",
                fix="use CompiledDecodeSession, or adapter_for(model).new_fixed_capacity_cache(max_tokens)",
            )
        check_state_tree(cache.state, name=f"caches[{index}].state")


def require_count(caches: Sequence[FixedCapacityCache], tokens: int) -> None:
    """Refuse caches that took in another number of tokens than were fed: the host would count past their end.

    Raises:
        HostState: names the cache.
    """
    for index, cache in enumerate(caches):
        held = cache.count()
        if held not in (None, tokens):
            raise HostState(
                "a cache took in another number of tokens than were fed",
                where=f"caches[{index}]: {type(cache).__name__}",
                found=held,
                allowed=tokens,
                fix="each entry of make_cache() must be written once a token, by one layer",
            )


def _leaves(tree: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(tree, list | tuple):
        for index, item in enumerate(tree):
            yield from _leaves(item, f"{path}[{index}]")
    elif type(tree) is dict:
        for key, item in tree.items():
            yield from _leaves(item, f"{path}[{key!r}]")
    else:
        yield path, tree
