"""The fingerprint of a model in use: made anew when its weights, its modules or their settings have changed."""

from __future__ import annotations

import operator
import threading
import weakref
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import mlx.nn as nn

from mlx_audit.adapters.module_state import Parameters
from mlx_audit.prefix.fingerprint import Fingerprint, Value, of_model


class LiveModel:
    """Knows whether a model is still what its fingerprint says, without reading its weights again.

    Weights may be loaded, adapters added, layers quantized or cast while a cache of the model is in use. What was
    stored before is then another model's. Objects are compared by identity; arrays are held weakly, so that replaced
    weights are freed. An array that is changed in place (`weight += 1`) stays the same object: that is noticed only
    when the weights are read.

    Args:
        model: The model.
        stated: Fields of the fingerprint that the caller states.
        lock: Held around MLX calls on the model.
        changed: Called when the model is no longer what it was.
    """

    def __init__(
        self,
        model: nn.Module,
        stated: Mapping[str, Value],
        lock: threading.RLock,
        changed: Callable[[], None],
    ) -> None:
        self._model, self._stated, self._lock, self._changed = model, dict(stated), lock, changed
        self._parameters = Parameters(model)
        self._arrays: list[weakref.ref[Any]] = []
        self._attributes: list[dict[str, Any]] = []
        self._values: list[tuple[Any, ...]] = []
        self._fingerprint: Fingerprint | None = None

    def fingerprint(self, *, read: bool = False) -> Fingerprint:
        """Return the fingerprint of the model as it is now; with `read`, its weights are read in any case."""
        with self._lock:
            arrays, known = self._parameters.arrays(), self._fingerprint
            if known is not None and not read and self._is_seen(arrays):
                return known
            now = replace(of_model(self._model), **self._stated)
            self._arrays = list(map(weakref.ref, arrays))
            self._attributes = [vars(module) for _, module in self._model.named_modules()]
            self._values = [tuple(own.values()) for own in self._attributes]
            if (
                known == now
            ):  # some models write their own weights anew in every forward; the old has its digest
                return known
            if known is not None:
                self._changed()
            self._fingerprint = now
            return now

    def _is_seen(self, arrays: list[Any]) -> bool:
        """Return whether the model has the very arrays and attributes of which the fingerprint was made."""
        seen = [array() for array in self._arrays]
        return (
            len(seen) == len(arrays)
            and all(map(operator.is_, arrays, seen))
            and all(map(_same, self._values, self._attributes))
        )


def _same(seen: tuple[Any, ...], attributes: dict[str, Any]) -> bool:
    return len(seen) == len(attributes) and all(map(operator.is_, seen, attributes.values()))
