"""Whether a stored stack is one of this model's: compared with the fresh caches that the model makes for a request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mlx_audit.prefix.layers import Layer, kind_for, kinds
from mlx_audit.prefix.reasons import PrefixRefused, Reason

_TIME = -2


def require_fitting(layers: Sequence[Layer], fresh: Sequence[Any]) -> None:
    """Refuse a stored stack of other kinds, windows, chunks or bits than the model's own.

    Args:
        layers: Of a snapshot or of a stored entry.
        fresh: From the model's `make_cache()`, in the form in which requests use them (quantized, where they are).

    Raises:
        PrefixRefused: other-fingerprint; unknown-class where the model makes caches without a rule.
    """
    if len(layers) != len(fresh):
        raise _other("layers", "stack", len(layers), len(fresh))
    for index, (layer, cache) in enumerate(zip(layers, fresh, strict=True)):
        _compare(layer, cache, f"layer {index}")


def require_form(layers: Sequence[Layer], sample: Sequence[Layer]) -> None:
    """Refuse a stored stack of other heads, widths or dtypes than the model's own.

    Args:
        layers: Of a snapshot or of a stored entry; they have passed `require_fitting`.
        sample: Of a stack that the model has fed, parts in place of what they are part of (`Costs.layers`).

    Raises:
        PrefixRefused: other-fingerprint.
    """
    inner = [
        (where, part)
        for index, layer in enumerate(layers)
        for where, part in layer.walk(f"layer {index}")
        if part.forms
    ]
    if len(inner) != len(sample):
        raise _other("number of layers that hold arrays", "stack", len(inner), len(sample))
    for (where, part), own in zip(inner, sample, strict=True):
        found, allowed = _fixed(part), _fixed(own)
        # Before a recurrence has as many tokens as it looks back, its arrays may be shorter.
        if found != allowed and not (part.kind == "arrays" and part.position < own.position):
            raise _other("form of arrays", where, found, allowed)


def _fixed(layer: Layer) -> list[object]:
    """Return of a layer's arrays what tokens do not change: all but the rows of keys; the shapes of a recurrence."""
    if layer.kind == "arrays":
        return [form and form.shape for form in layer.forms]
    return [form and (*form.shape[:_TIME], *form.shape[_TIME + 1 :], form.dtype) for form in layer.forms]


def _compare(layer: Layer, cache: Any, where: str) -> None:
    own = kind_for(cache, where)
    if layer.kind != own.kind:
        raise _other("cache kind", where, layer.kind, own.kind)
    for name in kinds()[layer.kind].settings:
        wanted = int(getattr(cache, name))
        if layer.parameters[name] != wanted:
            raise _other(name, where, layer.parameters[name], wanted)
    if layer.kind == "arrays" and len(layer.forms) != len(cache.cache):
        raise _other("number of arrays", where, len(layer.forms), len(cache.cache))
    if layer.kind == "composite":
        if len(layer.parts) != len(cache.caches):
            raise _other("number of parts", where, len(layer.parts), len(cache.caches))
        for index, (part, inner) in enumerate(zip(layer.parts, cache.caches, strict=True)):
            _compare(part, inner, f"{where} part {index}")


def _other(what: str, where: str, found: object, allowed: object) -> PrefixRefused:
    return PrefixRefused(
        Reason.OTHER_FINGERPRINT, f"stored for another {what}", where=where, found=found, allowed=allowed
    )
