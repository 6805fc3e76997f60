"""Operations played on one cache, beside a list of numbered tokens."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx

from mlx_audit.checks.base import CheckFailed
from mlx_audit.checks.numbered import NumberedText, require_right
from mlx_audit.checks.operations import CHUNK, WIDER, Player, require_refused
from mlx_audit.checks.parts import Part, capacity_for
from mlx_audit.checks.runs import state_bytes


@dataclass
class _Numbered:
    """A cache and the text that it must hold."""

    cache: Any
    text: NumberedText


class CachePlayer(Player):
    """One cache of a kind, beside a list of numbered tokens."""

    def __init__(self, part: Part) -> None:
        super().__init__()
        self._kind, self._spec = type(part.cache), part.spec
        self._capacity = capacity_for([part.spec])
        self._held: list[_Numbered] = []

    @property
    def _now(self) -> _Numbered:
        return self._held[self.current]

    def duplicate(self) -> None:
        self._held.append(_Numbered(self._now.cache.copy(), self._now.text.copy()))

    def prefill(self, tokens: int) -> None:
        text, native = NumberedText(self._spec), self._spec.new_native()
        for start in range(0, tokens, CHUNK):
            self._read(native, text, min(CHUNK, tokens - start))
        self._held = [_Numbered(self._kind.adopt(native, self._capacity), text)]

    def _read(self, native: Any, text: NumberedText, tokens: int) -> None:
        if self._spec.kind == "chunked":
            native.maybe_trim_front()
        native.update_and_fetch(*text.more(tokens))

    def step(self, _: int) -> None:
        """Write one token as a compiled step does: the host doesn't tell the cache how many it holds."""
        self._now.cache = self._now.cache.with_state(self._now.cache.state)
        self.extend(1)

    def extend(self, tokens: int) -> None:
        cache, held = self._now.cache, len(self._now.text.tokens)
        tokens = min(tokens, cache.capacity - held)
        if tokens:
            self._now.cache = cache.at_rung(held + tokens)
            require_right(self._now.cache, self._now.text, tokens, narrow=2)

    def trim(self, tokens: int) -> None:
        cache, text = self._now.cache, self._now.text
        held, before = len(text.tokens), state_bytes([cache.state])
        if tokens >= held:
            return
        wanted = tokens if self._spec.forgets(held, tokens) else 0
        if (got := cache.trim(tokens)) != wanted:
            raise CheckFailed(f"{text.label}: trim({tokens}) of {held} returned {got}, wanted {wanted}")
        del text.tokens[held - got :]
        self._require_count()
        if not got:
            self._require_unchanged(before, "a refused trim")

    def reload(self, _: int) -> None:
        cache = self._now.cache
        with tempfile.TemporaryDirectory(prefix="mlx-audit-") as folder:
            path = str(Path(folder) / "state.safetensors")
            mx.save_safetensors(path, {str(index): array for index, array in enumerate(cache.state)})
            arrays: Any = mx.load(path)
            mx.eval(arrays)
        blank = cache.with_state([mx.zeros_like(array) for array in cache.state])
        self._now.cache = blank.with_state([arrays[str(index)] for index in range(len(cache.state))])
        self._now.cache.require_sound()

    def hand_over(self, tokens: int) -> None:
        cache, text = self._now.cache, self._now.text
        capacity = self._capacity + WIDER * (cache.capacity == self._capacity)
        tokens = min(tokens, capacity - len(text.tokens))
        if tokens >= 0:
            native = cache.to_native()
            if tokens:
                self._read(native, text, tokens)
            self._now.cache = self._kind.adopt(native, capacity)

    def overflow(self, _: int) -> None:
        cache, text = self._now.cache, self._now.text
        before, held = state_bytes([cache.state]), cache.count()
        keys, values = text.copy().more(cache.capacity - held + 1)
        require_refused(lambda: cache.update_and_fetch(keys, values), f"{text.label}: one token too many")
        self._require_unchanged(before, "a refused token")

    def fail(self, _: int) -> None:
        """A cache alone has no layers."""

    def finish(self) -> None:
        for _ in self.each():
            self._require_count()
            self.extend(1)

    def _require_count(self) -> None:
        got, wanted = self._now.cache.count(), len(self._now.text.tokens)
        if got != wanted:
            raise CheckFailed(f"{self._spec.label} stands at {got}, wanted {wanted}")

    def _require_unchanged(self, before: list[bytes], label: str) -> None:
        if state_bytes([self._now.cache.state]) != before:
            raise CheckFailed(f"{self._spec.label}: {label} changed the state")
