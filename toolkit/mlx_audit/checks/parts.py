"""What each part of a stack must show and where it must write, from its parameters alone: the oracle of many checks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import (
    ArraysCache,
    ChunkedKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
    make_prompt_cache,
)

from mlx_audit.adapters import adapter_for
from mlx_audit.adapters.special.pooled import PooledKVCache
from mlx_audit.caches import FixedCapacityCache
from mlx_audit.checks.base import CheckFailed, NotRun
from mlx_audit.checks.content import leaves
from mlx_audit.checks.subject import Subject
from mlx_audit.decode import CompiledDecodeSession

CAPACITY = 29
"""Tokens of a session in which properties are drawn; more where a ring would not turn three times in it."""

POISON = 1e4
"""Large and finite: a masked slot is multiplied by zero, and zero times NaN is NaN."""

_LARGEST_RING = 64


@dataclass(frozen=True)
class PartSpec:
    """Kind and parameters of one native cache that is not composite.

    Attributes:
        kind: The manifest's name.
        ring: Tokens that a ring or a chunk holds; None where every token keeps its slot, or there are none.
        keep: First tokens of the text that a ring keeps for ever.
        bits, group_size: Of a quantized cache.
        ratio: Tokens that share an entry, which the last of them shows; 1 but for pooled ones.
    """

    kind: str
    ring: int | None = None
    keep: int = 0
    bits: int = 0
    group_size: int = 0
    ratio: int = 1

    @property
    def label(self) -> str:
        """Kind and parameters in words."""
        ring = f" of {self.ring}" if self.ring is not None else ""
        ratio = f" by {self.ratio}" if self.ratio > 1 else ""
        return f"{self.kind}{ring}{ratio}{f', {self.keep} kept' if self.keep else ''}"

    @classmethod
    def of(cls, native: Any) -> PartSpec:
        """Return what a native cache was made with."""
        if isinstance(native, RotatingKVCache):
            return cls("rotating", native.max_size, native.keep)
        if isinstance(native, ChunkedKVCache):
            return cls("chunked", native.chunk_size)
        if isinstance(native, QuantizedKVCache):
            return cls("quantized", bits=native.bits, group_size=native.group_size)
        if isinstance(native, PooledKVCache):
            return cls("pooled", ratio=native.ratio)
        return cls("arrays" if isinstance(native, ArraysCache) else "linear")

    def new_native(self) -> Any:
        """Return an empty mlx-lm cache of this form."""
        if self.kind == "rotating":
            return RotatingKVCache(self.ring, self.keep)
        if self.kind == "chunked":
            return ChunkedKVCache(self.ring)
        if self.kind == "pooled":
            return PooledKVCache(self.ratio)
        return QuantizedKVCache(self.group_size, self.bits) if self.kind == "quantized" else KVCache()

    def visible(self, query: int, window: int | None = None) -> list[int]:
        """Return the times of the tokens that the token at time `query` attends to, itself among them.

        Args:
            query: Its time.
            window: What a model asks for on top of the cache's own rule.
        """
        return [time for time in range(query + 1) if self._sees(query, time, window or query + 1)]

    def _sees(self, query: int, time: int, window: int) -> bool:
        near = query - time < window
        if self.kind == "pooled":
            return near and (time + 1) % self.ratio == 0
        if self.kind == "chunked":
            assert self.ring is not None
            return near and query // self.ring == time // self.ring
        if self.ring is None:
            return near
        return time < self.keep or (near and query - time < self.ring - self.keep)

    def slot(self, time: int, slots: int) -> int:
        """Return where a buffer of so many slots keeps the token of that time."""
        time //= self.ratio
        return time if time < slots else self.keep + (time - self.keep) % (slots - self.keep)

    def forgets(self, held: int, n: int) -> bool:
        """Return whether the last `n` of `held` tokens can be taken back exactly: nothing was overwritten."""
        return self.kind != "arrays" and (self.ring is None or held <= self.ring) and 0 <= n <= held


@dataclass
class Part:
    """One cache of a stack that is not composite: as the session has it, and what it must be.

    Attributes:
        name: Where it is, as `named_parts` says.
        cache: The fixed-capacity form.
        spec: Kind and parameters of the model's own.
    """

    name: str
    cache: FixedCapacityCache
    spec: PartSpec

    @property
    def slotted(self) -> bool:
        """Whether it has slots for tokens; a cache that the forward never writes has none."""
        return self.cache.slots > 0


def specs_of(subject: Subject) -> list[PartSpec]:
    """Return kind and parameters of every native part of the tiny model, in order."""
    return [PartSpec.of(native) for native in leaves(make_prompt_cache(subject.model))]


def named_parts(caches: Sequence[FixedCapacityCache]) -> list[tuple[str, FixedCapacityCache]]:
    """Return every part with its name: `caches[2]`, or `caches[2][0]` inside a composite one."""
    return [
        (f"caches[{index}]" if part is cache else f"caches[{index}][{number}]", part)
        for index, cache in enumerate(caches)
        for number, part in enumerate(cache.parts)
    ]


def parts_of(caches: Sequence[FixedCapacityCache], specs: Sequence[PartSpec]) -> list[Part]:
    """Pair the parts of fixed-capacity caches with what they must be.

    Raises:
        CheckFailed: another number of parts than the model's own caches have, or another kind.
    """
    named = named_parts(caches)
    got, want = [part.kind for _, part in named], [spec.kind for spec in specs]
    if got != want:
        raise CheckFailed(f"the fixed-capacity caches are {got}, the model's own {want}")
    return [Part(name, part, spec) for (name, part), spec in zip(named, specs, strict=True)]


def slotted_kinds(subject: Subject) -> list[Part]:
    """Return one part of each kind and parameters that has slots; what it holds means nothing."""
    caches = adapter_for(subject.model, evidence="ignore").new_fixed_capacity_cache(CAPACITY)
    parts = [part for part in parts_of(caches, specs_of(subject)) if part.slotted]
    return list({part.spec: part for part in reversed(parts)}.values())[::-1]


def written_specs(subject: Subject) -> list[PartSpec]:
    """Return the distinct kinds and parameters of the parts that hold anything."""
    caches = adapter_for(subject.model, evidence="ignore").new_fixed_capacity_cache(CAPACITY)
    return list(dict.fromkeys(part.spec for part in parts_of(caches, specs_of(subject)) if part.cache.state))


def without_slots(subject: Subject) -> str | None:
    """Return why claims about slots say nothing about a subject, or None where they do."""
    return None if slotted_kinds(subject) else "no cache has slots for tokens: nothing is masked"


def rings_of(specs: Sequence[PartSpec]) -> list[int]:
    """Return the distinct sizes of rings that are small enough to be turned, smallest first."""
    return sorted({spec.ring for spec in specs if spec.ring is not None and spec.ring <= _LARGEST_RING})


def capacity_for(specs: Sequence[PartSpec]) -> int:
    """Return a capacity in which every ring turns three times.

    Raises:
        NotRun: a ring is too large to be turned.
    """
    largest = max((spec.ring or 0 for spec in specs), default=0)
    if largest > _LARGEST_RING:
        raise NotRun(
            f"a ring of {largest} slots is too large to be turned three times here; give the tiny configuration "
            f"windows of at most {_LARGEST_RING}"
        )
    return max(CAPACITY, 3 * largest + 5)


def poisoned(
    session: CompiledDecodeSession,
    parts: Sequence[Part],
    value: float,
    slots: Mapping[str, Sequence[int]],
) -> CompiledDecodeSession:
    """Return a copy of a session in which some slots of every buffer hold `value`.

    Args:
        session: Where it stands.
        parts: Its parts, in order.
        value: Large and finite. A quantized buffer gets it as scales and biases.
        slots: By the name of the part.
    """
    filled = iter([_filled(part.cache, slots.get(part.name, ()), value) for part in parts])
    state = [[a for _ in cache.parts for a in next(filled)] for cache in session.caches]
    return session.with_state(state)


def _filled(cache: FixedCapacityCache, slots: Sequence[int], value: float) -> list[mx.array]:
    arrays = []
    for array, role in zip(cache.state, cache.roles, strict=True):
        if role == "buffer" and slots and array.size and mx.issubdtype(array.dtype, mx.floating):
            array = mx.array(array)
            array[:, :, mx.array(list(slots)), :] = finite_poison(value, cache, array.dtype)
        arrays.append(array)
    return arrays


def finite_poison(value: float, cache: FixedCapacityCache, dtype: mx.Dtype) -> float:
    """Return what of a poison stays finite in a buffer: a scale is multiplied by packed numbers of up to 255."""
    return max(-200.0, min(200.0, value)) if cache.kind == "quantized" and dtype == mx.float16 else value
