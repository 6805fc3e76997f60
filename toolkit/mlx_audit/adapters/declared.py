"""Fixed-capacity caches for a declared topology: compared with the model's own caches, then allocated like them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache

from mlx_audit.adapters.module_state import ModuleState
from mlx_audit.caches import FixedCapacityCache, cache_class
from mlx_audit.errors import NotCompileCapable
from mlx_audit.manifests import CacheSpec
from mlx_audit.models.live import entry_name, spec_of, unknown_classes

_PROBE = 8


def entry(cls: type[FixedCapacityCache], *parts: CacheSpec, **parameters: int) -> CacheSpec:
    """Return the declaration of one cache entry.

    Args:
        cls: The class that stands in for the model's own cache.
        parts: What a composite entry consists of.
        parameters: By the names of the manifest, in its order, such as `window` and `keep`.
    """
    kind = getattr(cls, "kind", None)
    if kind is None or cache_class(kind) is not cls:
        raise NotCompileCapable(
            "not a cache class of mlx-audit", found=cls, allowed="a class of mlx_audit.caches"
        )
    return CacheSpec(kind, tuple(parameters.items()), parts)


def allocate(
    model: nn.Module, declared: Sequence[CacheSpec], max_tokens: int, batch_size: int = 1
) -> list[FixedCapacityCache]:
    """Return one empty cache for each entry of the model's own `make_cache()`; nothing is evaluated.

    Args:
        model: An mlx-lm model; its parameters may be lazy.
        declared: One declaration an entry, in order; kind and parameters must be those of the model's own caches.
        max_tokens: Capacity in tokens, prompt included.
        batch_size: Rows decoded side by side.

    Raises:
        NotCompileCapable: the model keeps other caches than declared; names the first such entry.
    """
    native = make_prompt_cache(model)
    _require_same(model, [spec_of(cache) for cache in native], declared)
    # Head counts and widths are read off the arrays that lazy tokens leave behind; nothing is evaluated. Several, so
    # that a state of the last few ids has its full length, and that a forward which keeps something for single tokens
    # (a mask) meets its first one in the step itself.
    before = ModuleState(model)
    try:
        model(mx.zeros((batch_size, _PROBE), mx.int32), cache=native)
    finally:
        before.restore()
    return [_like(cache, max_tokens) for cache in native]


def require_known(model: nn.Module, live: Sequence[CacheSpec]) -> None:
    """Refuse a model with a cache class that has no fixed-capacity form.

    Raises:
        NotCompileCapable: names the first one.
    """
    for index, spec in enumerate(live):
        for place, name in unknown_classes(spec, f"cache {index}"):
            raise NotCompileCapable(
                "a cache class has no fixed-capacity form yet",
                where=f"{type(model).__module__} {place}",
                found=name,
            )


def _require_same(model: nn.Module, live: Sequence[CacheSpec], declared: Sequence[CacheSpec]) -> None:
    module = type(model).__module__
    if len(live) != len(declared):
        raise NotCompileCapable(
            "the declared topology has another number of caches than the model",
            where=module,
            found=f"{len(live)} caches",
            allowed=f"{len(declared)} as declared",
            fix="correct `topology:` in the manifest",
        )
    require_known(model, live)
    for index, (found, wanted) in enumerate(zip(live, declared, strict=True)):
        if found != wanted:
            raise NotCompileCapable(
                "the declared topology has another cache than the model",
                where=f"{module} {entry_name(model, index, len(live))}",
                found=found.label(),
                allowed=f"{wanted.label()} as declared",
                fix="correct `topology:` in the manifest",
            )


def _like(native: Any, max_tokens: int) -> FixedCapacityCache:
    cls = cache_class(spec_of(native).kind)
    assert cls is not None, "each kind has a class"
    return cls.like(native, max_tokens)
