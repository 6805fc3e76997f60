"""What the slotted caches share that keep plain keys and values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from mlx_audit.caches.slots import SlottedCache


def pair(buffers: Sequence[mx.array]) -> tuple[mx.array | None, mx.array | None]:
    """Return keys and values, None each where there are no buffers."""
    if not buffers:
        return None, None
    keys, values = buffers
    return keys, values


class KeyedCache(SlottedCache):
    """Keys `[B, heads, slots, key width]` and values `[B, heads, slots, value width]`; models may assign both."""

    keys: mx.array | None
    values: mx.array | None

    def _buffers(self) -> list[mx.array]:
        return [] if self.keys is None or self.values is None else [self.keys, self.values]

    def _set_buffers(self, buffers: Sequence[mx.array]) -> None:
        self.keys, self.values = pair(buffers)

    def _written_buffers(self) -> tuple[mx.array, mx.array]:
        """Return keys and values of a cache that is in use."""
        keys, values = self._buffers()
        return keys, values

    def _up_to_rung(self) -> tuple[mx.array, mx.array]:
        """Return what the next single token attends over."""
        keys, values = self._written_buffers()
        if self._rung == self.slots:
            return keys, values
        return keys[:, :, : self._rung], values[:, :, : self._rung]

    @classmethod
    def _native_buffers(cls, native: Any) -> list[mx.array]:
        return [] if native.keys is None or native.values is None else [native.keys, native.values]
