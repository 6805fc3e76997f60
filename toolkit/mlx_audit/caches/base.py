"""What every fixed-capacity cache offers to unmodified mlx-lm models and to the compiled step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Self, cast

import mlx.core as mx

Role = Literal["buffer", "position", "recurrent"]
"""What a state leaf is: slots written by index, the index itself, or a value that each step replaces as a whole."""


def handle(array: mx.array) -> mx.array:
    """Return a second Python handle of the same array, at no cost in the graph.

    MLX's augmented assignment (`offset += 1`) rebinds the handle that it is applied to, and with it every Python
    name that shares the handle. A value handed out through its own handle cannot be changed from outside.
    """
    return mx.reshape(array, array.shape)


def host_int(array: mx.array) -> int:
    """Return the one integer of an array, which waits for its evaluation."""
    return cast(int, array.item())


def host_float(array: mx.array) -> float:
    """Return the one number of an array, which waits for its evaluation."""
    return float(cast(float, array.item()))


@dataclass
class Handed:
    """What a cache handed out for the last single token, so that a kernel can tell its own arrays from others.

    Attributes:
        keys, values: As `update_and_fetch` returned them.
        mask: As `make_mask` returned it: plainly causal, without a window.
        position: Where the token was written.
    """

    keys: mx.array | None = None
    values: mx.array | None = None
    mask: mx.array | None = None
    position: mx.array | None = None


class FixedCapacityCache(ABC):
    """A cache whose arrays never change shape or dtype and whose position is an array carried through the graph.

    It defines neither `__len__` nor `__bool__` (mlx-lm tests `if cache`), nor `bits` unless it is quantized (mlx-lm
    then takes another attention function).
    """

    kind: ClassVar[str]
    """The manifest's name of this cache kind."""
    native: ClassVar[type]
    """The mlx-lm cache class that this one stands in for."""
    rewinds: ClassVar[bool] = False
    """Whether `trim(1)` right after a single-token step is always possible."""

    capacity: int
    """Tokens, prompt included."""
    slots: int = 0
    """Slots of the buffers; 0 where attention reads none."""
    rows: int = 1
    """Rows decoded side by side."""
    ragged: bool = False
    """Whether the rows hold different numbers of tokens, padded on the left."""
    handed: Handed | None = None
    """Kept only while a step runs with an attention kernel of our own, which needs it: see `decode.attention_cuda`."""

    @property
    @abstractmethod
    def state(self) -> list[mx.array]:
        """All arrays that go into the compiled step and come out of it, in a fixed order."""

    @property
    @abstractmethod
    def roles(self) -> list[Role]:
        """What each array of `state` is."""

    @property
    def parts(self) -> list[FixedCapacityCache]:
        """The caches that this one consists of: itself, or those inside a composite one."""
        return [self]

    @property
    def extent(self) -> int:
        """Slots that the next single token attends over: those of the rung, and no more than there are."""
        return self.slots

    @abstractmethod
    def with_state(self, state: Sequence[mx.array], *, held: int | None = None) -> Self:
        """Return a cache of the same configuration over `state`, without reading any value of it.

        Args:
            state: In the order of `state`.
            held: Tokens in it, where the host knows; then the cache refuses what does not fit. A compiled step
                does not know, and its caller has counted.
        """

    def at_rung(self, rung: int) -> Self:
        """Return a cache over the same arrays of which a step attends to the first `rung` slots only.

        The caller has counted: every token held, and every token of the next call, lies below the rung.
        """
        return self

    @classmethod
    @abstractmethod
    def like(cls, native: Any, max_tokens: int) -> Self:
        """Return an empty cache with the batch, heads, widths and dtypes of a written `native`; reads no value."""

    @classmethod
    @abstractmethod
    def adopt(cls, native: Any, max_tokens: int) -> Self:
        """Take over an eagerly prefilled mlx-lm cache; `native` is left as it was."""

    @classmethod
    @abstractmethod
    def merge(cls, natives: Sequence[Any], max_tokens: int) -> Self:
        """Take over the caches of rows that were prefilled alone, each of one row, as a ragged batch.

        Rows are padded on the left, so that all write at the same slot: the longest row begins at slot 0.

        Raises:
            ShapeMismatch: this kind cannot hold rows of different length.
        """

    def refilled(self, native: Any) -> Self:
        """Return a cache of this one's form that has taken `native` over."""
        return type(self).adopt(native, self.capacity)

    def merged(self, natives: Sequence[Any]) -> Self:
        """Return a ragged batch of this one's form that has taken the rows `natives` over."""
        return type(self).merge(natives, self.capacity)

    @abstractmethod
    def padded(self) -> Self:
        """Return a cache of this one's form, as a ragged batch has it; its content means nothing."""

    @abstractmethod
    def to_native(self) -> Any:
        """Return the mlx-lm cache with the same content."""

    @abstractmethod
    def count(self) -> int | None:
        """Return the tokens held, padding included, read from the position; None where a cache has no position.

        From then on the cache refuses what does not fit.
        """

    def require_sound(self) -> None:
        """Refuse positions that contradict the buffers; reads them, so that a state from a file can be trusted.

        Raises:
            CapacityExceeded: a position lies outside.
            HostState: the parts stand at different positions.
        """
        for part in self.parts:
            if part is not self:
                part.require_sound()
        self.count()

    @abstractmethod
    def trim(self, n: int) -> int:
        """Forget the last `n` tokens and return `n`, or return 0 and change nothing where that is impossible."""

    def copy(self) -> Self:
        """Return an independent cache with the same content; buffers are shared until either one writes."""
        return self.with_state([handle(array) for array in self.state])

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers, at full capacity."""
        return sum(array.nbytes for array in self.state)
