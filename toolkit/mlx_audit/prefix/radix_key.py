"""Token ids as bytes: converted once, where they come in, and compared in place from then on."""

from __future__ import annotations

import struct
import sys
from array import array
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from mlx_audit.errors import MlxAuditError, ShapeMismatch

WIDTH = 4
"""Bytes of one token id: a signed 32-bit integer, little-endian."""

MOST = 2**31 - 1
"""The largest token id."""

_CHUNK = 1 << 14
_ID = struct.Struct("<i")
_ALLOWED = f"whole numbers from 0 to {MOST}"


class IndexMisuse(MlxAuditError):
    """The prefix index was asked for something that has no meaning; nothing was changed."""


class TokenKey:
    """Token ids, checked and packed as int32 little-endian bytes; cannot be changed.

    Whoever asks several times about the same tokens packs them once, and asks with the key.
    """

    __slots__ = ("data",)

    def __init__(self, tokens: Tokens = ()) -> None:
        """Pack ids of a list, a tuple, an `array`, or a one-dimensional integer array of NumPy or MLX.

        Raises:
            ShapeMismatch: An id is negative, above 2**31 - 1, a truth value or no integer; text or raw bytes.
        """
        self.data: bytes = tokens.data if isinstance(tokens, TokenKey) else _packed(tokens)

    @classmethod
    def of_bytes(cls, data: bytes) -> TokenKey:
        """The key whose packed bytes these are; they were packed here before, and are not checked again."""
        key = cls.__new__(cls)
        key.data = data
        return key

    def __len__(self) -> int:
        return len(self.data) // WIDTH

    def __iter__(self) -> Iterator[int]:
        return (token for (token,) in _ID.iter_unpack(self.data))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TokenKey) and self.data == other.data

    def __hash__(self) -> int:
        return hash(self.data)

    def __repr__(self) -> str:
        return f"TokenKey({abbreviated(self.data)})"


Tokens = TokenKey | Iterable[int]
"""What every method that takes tokens accepts."""


def token_at(data: bytes, offset: int) -> int:
    """The id whose bytes begin at `offset`."""
    token: int = _ID.unpack_from(data, offset)[0]
    return token


def common_length(edge: bytes, data: bytes, offset: int, limit: int) -> int:
    """How many bytes of `edge` stand in `data` at `offset`, in whole tokens and none beyond `limit`.

    Compares in place: neither is copied, whatever their length.
    """
    high = min(len(edge), limit - offset)
    low, view = 0, memoryview(edge)
    while low < high:
        end = min(low + _CHUNK, high)
        if not data.startswith(view[low:end], offset + low):
            high = end
            break
        low = end
    while high - low > WIDTH:
        middle = low + (high - low) // (2 * WIDTH) * WIDTH
        if data.startswith(view[low:middle], offset + low):
            low = middle
        else:
            high = middle
    return high if data.startswith(view[low:high], offset + low) else low


def abbreviated(data: bytes, shown: int = 6) -> str:
    """The ids for people: `12 7 9 … 4 (1,200 tokens)`."""
    count = len(data) // WIDTH
    if count <= shown:
        return " ".join(str(token_at(data, index * WIDTH)) for index in range(count))
    first = " ".join(str(token_at(data, index * WIDTH)) for index in range(shown - 1))
    return f"{first} … {token_at(data, len(data) - WIDTH)} ({count:,} tokens)"


def _packed(tokens: Iterable[int]) -> bytes:
    if isinstance(tokens, str | bytes | bytearray | memoryview):
        raise _refusal("text and raw bytes are no token ids", type(tokens).__name__)
    if isinstance(tokens, list | tuple):
        return _from_list(tokens)
    return _from_array(tokens)


def _from_list(tokens: list[Any] | tuple[Any, ...]) -> bytes:
    # `array` takes truth values for numbers, and negative ids; floats and long integers it refuses itself.
    if not set(map(type, tokens)) <= {int}:
        for index, token in enumerate(tokens):
            if isinstance(token, bool) or not isinstance(token, int | np.integer):
                raise _refusal("a token id is no integer", token, index)
    try:
        packed = array("i", tokens)
    except OverflowError:
        packed = array("i")
    # NumPy looks at the packed ids, since `min` would make an object of each.
    if len(packed) != len(tokens) or (packed and int(np.frombuffer(packed, np.intc).min()) < 0):
        index, token = next((i, t) for i, t in enumerate(tokens) if not 0 <= t <= MOST)
        raise _refusal("a token id is out of range", token, index)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def _from_array(tokens: Any) -> bytes:
    if not hasattr(tokens, "__array__") and not isinstance(tokens, array):
        raise _refusal("tokens are no list of ids", type(tokens).__name__)
    values = np.asarray(tokens)
    if values.ndim != 1:
        raise _refusal("tokens have more or fewer axes than one", f"shape {list(values.shape)}")
    if values.dtype.kind not in "iu" and not (values.size == 0 and isinstance(tokens, array)):
        raise _refusal("token ids are no integers", f"dtype {values.dtype}")
    if values.size and (int(values.min()) < 0 or int(values.max()) > MOST):
        index = int(np.argmax((values < 0) | (values > MOST)))
        raise _refusal("a token id is out of range", int(values[index]), index)
    return values.astype("<i4").tobytes()


def _refusal(what: str, found: object, index: int | None = None) -> ShapeMismatch:
    where = "tokens" if index is None else f"tokens[{index}]"
    return ShapeMismatch(
        what, where=where, found=repr(found) if index is not None else found, allowed=_ALLOWED
    )
