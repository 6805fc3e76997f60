"""The adapter that serves every family whose topology consists of known cache kinds."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache

from mlx_audit.adapters.module_state import ModuleState
from mlx_audit.caches import FixedCapacityCache, cache_class, kind_of
from mlx_audit.errors import NotCompileCapable

_PROBE = 8


class GenericAdapter:
    """Makes fixed-capacity caches for a model from the kinds of its caches.

    Args:
        model: An mlx-lm model; its parameters may be lazy, nothing is evaluated.
        kinds: One manifest kind for each entry of `make_cache()`; by default the kinds of the live caches.
    """

    def __init__(self, model: nn.Module, kinds: Sequence[str] | None = None) -> None:
        self.model = model
        self.kinds = list(kinds) if kinds is not None else live_kinds(model)

    def new_fixed_capacity_cache(self, max_tokens: int, *, batch_size: int = 1) -> list[FixedCapacityCache]:
        """Return one empty cache an entry of `make_cache()`; see `FixedCapacityKVCacheProviding`."""
        native = make_prompt_cache(self.model)
        if len(native) != len(self.kinds):
            raise NotCompileCapable(
                "the declared topology has another number of caches than the model",
                where=type(self.model).__module__,
                found=f"{len(native)} caches",
                allowed=f"{len(self.kinds)} as declared",
                fix="correct `topology:` in the manifest",
            )
        # Head counts and widths are read off the arrays that lazy tokens leave behind; nothing is evaluated. Several,
        # so that a state of the last few ids has its full length, and that a forward which keeps something for single
        # tokens (a mask) meets its first one in the step itself.
        before = ModuleState(self.model)
        try:
            self.model(mx.zeros((batch_size, _PROBE), mx.int32), cache=native)
        finally:
            before.restore()
        return [
            _class_for(kind, cache).like(cache, max_tokens)
            for kind, cache in zip(self.kinds, native, strict=True)
        ]


def live_kinds(model: nn.Module) -> list[str]:
    """Return the manifest kind of each entry of the model's own `make_cache()`.

    Raises:
        NotCompileCapable: a cache class has no fixed-capacity form.
    """
    kinds = []
    for index, cache in enumerate(make_prompt_cache(model)):
        kind = kind_of(cache)
        if kind is None:
            raise NotCompileCapable(
                "a cache class has no fixed-capacity form yet",
                where=f"{type(model).__module__} cache {index}",
                found=type(cache).__name__,
            )
        kinds.append(kind)
    return kinds


def _class_for(kind: str, native: object) -> type[FixedCapacityCache]:
    cls = cache_class(kind)
    if cls is None:
        raise NotCompileCapable("there is no fixed-capacity cache of this kind yet", found=kind)
    if cls.native is not type(native):
        raise NotCompileCapable(
            "the declared topology has another cache class than the model",
            found=type(native).__name__,
            allowed=f"{cls.native.__name__}, as `{kind}` is declared",
            fix="correct `topology:` in the manifest",
        )
    return cls
