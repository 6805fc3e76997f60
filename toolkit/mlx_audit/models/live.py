"""The topology that a built model really has, in the words of a manifest."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import mlx.nn as nn
from mlx_lm.models import cache as native

from mlx_audit.manifests import CacheSpec
from mlx_audit.manifests.kinds import KINDS


def live_specs(model: nn.Module) -> list[CacheSpec]:
    """Return what each entry of the model's own `make_cache()` is.

    A class that no kind stands for has its own name in the place of the kind: see `unknown_classes`.
    """
    return [spec_of(entry) for entry in native.make_prompt_cache(model)]


def flat_specs(model: nn.Module) -> list[CacheSpec]:
    """Return the caches of known classes, the parts of composites one by one."""
    return [part for spec in live_specs(model) for part in leaves(spec) if part.kind in KINDS]


def leaves(spec: CacheSpec) -> list[CacheSpec]:
    """Return the entry itself, or the parts of a composite, in order, however deep."""
    return [leaf for part in spec.of for leaf in leaves(part)] if spec.of else [spec]


def unknown_classes(spec: CacheSpec, place: str) -> Iterator[tuple[str, str]]:
    """Yield place and name of each class in a live entry that no kind stands for, inside composites too."""
    if spec.kind not in KINDS:
        yield place, spec.kind
        return
    for number, part in enumerate(spec.of):
        yield from unknown_classes(part, f"{place}, part {number}")


def entry_name(model: nn.Module, index: int, entries: int) -> str:
    """Return `layer 3` where each layer has one entry, else `cache 3`: the index in what `make_cache()` returned."""
    layers = getattr(model, "layers", None)
    one_each = isinstance(layers, list | tuple) and len(layers) == entries
    return f"{'layer' if one_each else 'cache'} {index}"


def is_mlx_lms(class_name: str) -> bool:
    """Return whether a cache class of this full name comes with mlx-lm's cache module."""
    return class_name.startswith(f"{native.__name__}.")


def spec_of(entry: Any) -> CacheSpec:
    """Return an mlx-lm cache as kind and parameters; by its exact class, because a subclass may mean anything."""
    if type(entry) is native.KVCache:
        return CacheSpec("linear")
    if type(entry) is native.RotatingKVCache:
        return CacheSpec("rotating", (("window", entry.max_size), ("keep", entry.keep)))
    if type(entry) is native.ArraysCache:
        return CacheSpec("arrays", (("slots", len(entry.cache)),))
    if type(entry) is native.ChunkedKVCache:
        return CacheSpec("chunked", (("chunk", entry.chunk_size),))
    if type(entry) is native.QuantizedKVCache:
        return CacheSpec("quantized", (("bits", entry.bits), ("group_size", entry.group_size)))
    if type(entry) is native.CacheList:
        return CacheSpec("composite", (), tuple(spec_of(part) for part in entry.caches))
    # A class of the model's own may say what it holds, as CacheList does; it stays one that no kind stands for.
    own = f"{type(entry).__module__}.{type(entry).__qualname__}"
    return CacheSpec(own, (), tuple(spec_of(part) for part in getattr(entry, "caches", ())))
