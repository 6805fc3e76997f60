"""One native mlx-lm cache as data, and the classes that know how each kind is read and made anew.

A layer is in **normal form**: the rows that hold tokens and may still be read, without mlx-lm's padding to 256 rows and
without the rows that a rotating cache is about to drop. A cache made of it goes on as the one that was read.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from math import prod
from typing import Any, ClassVar

import mlx.core as mx

from mlx_audit.prefix.reasons import PrefixRefused, Reason

DTYPES: dict[str, mx.Dtype] = {
    name: getattr(mx, name)
    for name in (
        *("bool_", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64"),
        *("float16", "bfloat16", "float32", "float64", "complex64"),
    )
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class ArrayForm:
    """Shape and dtype of one array; `dtype` is a key of `DTYPES`."""

    shape: tuple[int, ...]
    dtype: str

    @classmethod
    def of(cls, array: mx.array) -> ArrayForm:
        """Return the form of an array, which need not be evaluated."""
        return cls(tuple(array.shape), _NAMES[array.dtype])

    @property
    def nbytes(self) -> int:
        """Bytes of such an array."""
        return prod(self.shape) * DTYPES[self.dtype].size


@dataclass(frozen=True)
class Layer:
    """A native cache without its arrays.

    Attributes:
        kind: A key of `rules.RULES`.
        position: Tokens that it has taken in; recurrent classes don't count them, so the snapshot does.
        parameters: Integers of its class, by mlx-lm's names (`max_size`, `keep`, `_idx`, `start_position`, ...).
        forms: One for each array, in the order in which the kind lists them; None for a slot without an array.
        parts: Of a composite cache.
    """

    kind: str
    position: int
    parameters: Mapping[str, int] = field(default_factory=dict)
    forms: tuple[ArrayForm | None, ...] = ()
    parts: tuple[Layer, ...] = ()

    @property
    def leaves(self) -> tuple[ArrayForm, ...]:
        """Forms of all arrays, those of parts included."""
        own = tuple(form for form in self.forms if form is not None)
        return own + tuple(form for part in self.parts for form in part.leaves)

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return sum(form.nbytes for form in self.leaves)

    @property
    def rows(self) -> int:
        """Rows along the time axis of keys and values; 0 for other kinds."""
        first = self.forms[0] if self.forms else None
        return first.shape[-2] if first is not None and len(first.shape) > 1 else 0

    def walk(self, name: str) -> Iterator[tuple[str, Layer]]:
        """Yield this layer and its parts, outermost first, each with its place."""
        yield name, self
        for index, part in enumerate(self.parts):
            yield from part.walk(f"{name} part {index}")


Arrays = list[mx.array]
"""The arrays of a layer in the order of `Layer.leaves`."""


class Kind(ABC):
    """How caches of one native class are read, checked, cut and made."""

    kind: ClassVar[str]
    native: ClassVar[type]
    attributes: ClassVar[frozenset[str]]
    """Instance attributes of the class; another one may hold state that nobody would carry."""
    slots: ClassVar[tuple[str, ...]] = ()
    """Names of the arrays, where their number is fixed."""
    settings: ClassVar[tuple[str, ...]] = ()
    """Parameters that the model chooses; a fresh cache has them, too."""
    counters: ClassVar[tuple[str, ...]] = ()
    """Parameters that move as tokens come."""

    @abstractmethod
    def read(self, native: Any, position: int, where: str) -> tuple[Layer, Arrays]:
        """Return the normal form of a cache; the arrays are lazy and share its buffers.

        Raises:
            PrefixRefused: it holds another number of tokens than `position`, more than one row, or contradicts itself.
        """

    def check(self, layer: Layer, where: str) -> None:
        """Refuse a layer whose parameters, position and forms contradict each other."""
        names = sorted((*self.settings, *self.counters))
        require(sorted(layer.parameters) == names, f"the parameters are {names}", where, layer.parameters)
        wanted = len(self.slots)
        require(not wanted or len(layer.forms) == wanted, f"{wanted} arrays", where, len(layer.forms))

    @abstractmethod
    def cut(self, layer: Layer, arrays: Arrays, prefix: int) -> tuple[Layer, Arrays]:
        """Return the layer as it was at a shorter prefix; `rules.refusal` has allowed it."""

    @abstractmethod
    def make(self, layer: Layer, arrays: Arrays) -> Any:
        """Return a new native cache over `arrays`."""

    @abstractmethod
    def position(self, native: Any) -> int | None:
        """Return the tokens that a native cache counts; None where its class does not count."""

    def array_names(self, layer: Layer) -> list[str]:
        """Return a name for each of the layer's own arrays."""
        names = self.slots or tuple(map(str, range(len(layer.forms))))
        return [name for name, form in zip(names, layer.forms, strict=True) if form is not None]


@cache
def kinds() -> Mapping[str, Kind]:
    """Return the kinds by name."""
    from mlx_audit.prefix import layers_arrays, layers_keyed

    return {kind.kind: kind for kind in (*layers_keyed.KINDS, *layers_arrays.KINDS)}


def kind_for(native: object, where: str) -> Kind:
    """Return the kind of a native cache, by its exact class.

    Raises:
        PrefixRefused: unknown-class, also for a subclass and for an attribute that the class does not have; batched.
    """
    name = f"{type(native).__module__}.{type(native).__qualname__}"
    found = next((kind for kind in kinds().values() if kind.native is type(native)), None)
    if found is None and type(native).__name__ in ("BatchKVCache", "BatchRotatingKVCache"):
        raise PrefixRefused(Reason.BATCHED, where=where, found=name, allowed="the caches of one row")
    if found is None:
        known = ", ".join(sorted(kind.native.__name__ for kind in kinds().values()))
        raise PrefixRefused(
            Reason.UNKNOWN_CLASS, where=where, found=name, allowed=f"exactly one of mlx-lm's {known}"
        )
    extra = set(vars(native)) ^ found.attributes
    if extra:
        raise PrefixRefused(
            Reason.UNKNOWN_CLASS,
            "the cache has other attributes than its class, which no rule carries",
            where=where,
            found=f"{name}: {sorted(extra)}",
            allowed=sorted(found.attributes),
        )
    return found


def read_layer(native: object, position: int, where: str) -> tuple[Layer, Arrays]:
    """Return the normal form of a native cache that has taken in `position` tokens; see `Kind.read`."""
    kind = kind_for(native, where)
    layer, arrays = kind.read(native, position, where)
    kind.check(layer, where)
    return layer, arrays


def require_position(found: int, position: int, where: str) -> None:
    """Refuse a layer that counts another number of tokens than the key has."""
    if found != position:
        raise PrefixRefused(Reason.POSITION_MISMATCH, where=where, found=found, allowed=position)


def require_one_row(arrays: Sequence[mx.array], where: str) -> None:
    """Refuse arrays of several rows; the first axis counts them."""
    for array in arrays:
        if array.ndim == 0 or array.shape[0] != 1:
            raise PrefixRefused(Reason.BATCHED, where=where, found=array.shape, allowed="one row")


def require(held: bool, detail: str, where: str, found: object) -> None:
    """Refuse a layer that contradicts itself."""
    if not held:
        raise PrefixRefused(Reason.POSITION_MISMATCH, detail, where=where, found=found)


def copied(array: mx.array) -> mx.array:
    """Return an array in a buffer of its own.

    `mx.contiguous` gives a contiguous array back as it is, and a deep copy shares the buffer until the first write; a
    concatenation always writes a new one.
    """
    if array.ndim == 0:
        return mx.reshape(copied(mx.reshape(array, (1,))), ())
    return mx.concatenate([array[:0], array], axis=0)
