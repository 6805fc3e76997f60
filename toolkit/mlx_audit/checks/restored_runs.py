"""What the checks of restored prefixes share: cold runs in chunks, and an oracle that reads native caches by itself.

The oracle asks nothing of `mlx_audit.prefix`: a mistake there would be made on both sides of a comparison.
"""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.cache import ArraysCache

from mlx_audit.checks.base import Check, CheckFailed, Figures, NotRun
from mlx_audit.checks.content import content, leaves
from mlx_audit.checks.runs import PROMPT, Eager, windows
from mlx_audit.checks.subject import Subject
from mlx_audit.checks.tolerance import largest_difference
from mlx_audit.errors import describe
from mlx_audit.prefix import PrefixRefused, Reason

LAST = 3
"""Tokens of the last chunk of a prompt: a state that is one update old is three tokens old."""

_SUFFIXES = (1, 2, 15, 16, 17)
_WIDEST = 128
"""Windows above it are not walked around: the tiny models of manifests have smaller ones."""

_STATED = ("offset", "keep", "max_size", "chunk_size", "group_size", "bits")
"""What a native cache says of itself, and a restored one must say, too."""


class RestoreCheck(Check):
    """A check of the claim `prefix_restore`; a cache class without a restore rule leaves it undecided."""

    claim = "prefix_restore"

    def run(self, subject: Subject) -> Figures:
        try:
            return self.prove(subject)
        except PrefixRefused as refused:
            if refused.reason is Reason.UNKNOWN_CLASS:
                raise NotRun(str(refused)) from refused
            raise CheckFailed(str(refused), where=refused.where) from refused

    @abstractmethod
    def prove(self, subject: Subject) -> Figures:
        """Check the claim, as `run` does; a refusal that gets out of it is a failure."""


@dataclass(frozen=True)
class Prefix:
    """How a run comes to its snapshot: a prompt in two chunks, then tokens one by one.

    Attributes:
        prompt: Tokens of the prompt, more than `LAST`.
        decoded: Tokens after it.
    """

    prompt: int
    decoded: int = 0

    @property
    def length(self) -> int:
        """Tokens in all."""
        return self.prompt + self.decoded

    def run(self, model: nn.Module, tokens: Sequence[int]) -> Eager:
        """Return a cold run at the end of the prefix."""
        eager = Eager(model)
        stops = [0, self.prompt - LAST, *range(self.prompt, self.length + 1)]
        for start, end in pairwise(stops):
            eager.feed(tokens[start:end])
        return eager

    def __str__(self) -> str:
        more = f" and {self.decoded} decoded" if self.decoded else ""
        return f"a prompt of {self.prompt} tokens{more}"


def edges(model: nn.Module) -> list[int]:
    """Return the windows and chunk sizes of a model, in tokens, that are small enough to walk around."""
    return [size for size in windows(model) if size <= _WIDEST]


def suffixes(model: nn.Module) -> list[int]:
    """Return the lengths to go on by: short, around the margin of 16, and around each window."""
    near = {size + step for size in edges(model) for step in (-1, 0, 1)}
    return sorted({*_SUFFIXES, *(length for length in near if length > 0)})


def prompts(model: nn.Module) -> list[Prefix]:
    """Return prompts that leave a ring with more rows than its window, and with fewer."""
    longest = max(edges(model), default=0)
    short = {max(size - 2, LAST + 1) for size in edges(model)}
    return [Prefix(max(PROMPT, longest + LAST + 2)), *(Prefix(length) for length in sorted(short))]


def turned(model: nn.Module) -> Prefix:
    """Return a prefix after which every ring has turned by single tokens."""
    longest = max(edges(model), default=2)
    return Prefix(max(PROMPT, longest + LAST + 2), longest + LAST)


def twin(eager: Eager) -> Eager:
    """Return a run of its own at the same place, by Python's deep copy and not by a snapshot."""
    return Eager(eager.model, cache=copy.deepcopy(eager.cache))


@dataclass
class Continued:
    """Restored runs beside cold ones: what their states say, and what their logits alone would have said.

    Attributes:
        compared: Arrays compared.
        wrong: What differs, in words.
        logits: By place, the largest difference of the logits; text where the run raised.
        suffixes: Lengths gone on by.
    """

    compared: int = 0
    wrong: list[str] = field(default_factory=list)
    logits: dict[str, float | str] = field(default_factory=dict)
    suffixes: set[int] = field(default_factory=set)

    def go_on(self, restored: list[Any], cold: Eager, suffix: Sequence[int], label: str) -> None:
        """Compare both states; feed the suffix to both, and compare states and logits again; the cold run moves on."""
        where = f"{label}, suffix {len(suffix)}"
        self.suffixes.add(len(suffix))
        self._states(restored, cold.cache, f"{label}, as it was restored")
        wanted = cold.feed(suffix)
        warm = Eager(cold.model, cache=restored)
        try:
            got = warm.feed(suffix)
        except Exception as error:  # a state of another form may not be usable at all
            self.wrong.append(f"{where}: the restored run raises {describe(error)}")
            self.logits[where] = "raises"
            return
        self.end(warm, got, cold, wanted, where)

    def end(self, warm: Eager, got: mx.array, cold: Eager, wanted: mx.array, where: str) -> None:
        """Compare states and logits at the end of a suffix."""
        self._states(warm.cache, cold.cache, where)
        self.logits[where] = moved = largest_difference(got, wanted)
        if bits(got) != bits(wanted):
            self.wrong.append(f"{where}: the logits differ by {moved:.3g}")

    def figures(self) -> Figures:
        """Return what was compared."""
        return {"arrays_compared": self.compared, "suffixes": sorted(self.suffixes)}

    def require_equal(self) -> None:
        """Fail where anything differs.

        Raises:
            CheckFailed: with the first difference, and how much of it the logits alone would have shown.
        """
        if not self.wrong:
            return
        numbers = [value for value in self.logits.values() if isinstance(value, float)]
        least = f"; logits alone read {min(numbers):.3g} to {max(numbers):.3g}" if numbers else ""
        raise CheckFailed(
            f"{self.wrong[0]}{least}",
            where=self.wrong[0].partition(":")[0],
            figures={**self.figures(), "differences": len(self.wrong), "logits_alone": dict(self.logits)},
        )

    def _states(self, found: Sequence[Any], wanted: Sequence[Any], label: str) -> None:
        count, differs = state_differences(found, wanted)
        self.compared += count
        self.wrong += [f"{label}: {text}" for text in differs]


def state_differences(found: Sequence[Any], wanted: Sequence[Any]) -> tuple[int, list[str]]:
    """Return how many arrays of two stacks were compared, and what differs, bit by bit and count by count."""
    ours, theirs = leaves(found), leaves(wanted)
    if list(map(type, ours)) != list(map(type, theirs)):
        return 0, [f"the caches are {_names(ours)}, wanted {_names(theirs)}"]
    count, differs = 0, []
    for index, (own, want) in enumerate(zip(ours, theirs, strict=True)):
        name = f"cache {index} ({type(want).__name__})"
        said, meant = _said(own), _said(want)
        differs += [
            f"{name} says {key} {said[key]}, wanted {meant[key]}" for key in meant if said[key] != meant[key]
        ]
        arrays, cold = content(own), content(want)
        if [(a.shape, a.dtype) for a in arrays] != [(a.shape, a.dtype) for a in cold]:
            forms = [[list(a.shape) for a in side] for side in (arrays, cold)]
            differs.append(f"{name} holds {forms[0]}, wanted {forms[1]}")
            continue
        for place, (a, b) in enumerate(zip(arrays, cold, strict=True)):
            count += 1
            if bits(a) != bits(b):
                differs.append(f"{name}, array {place}, differs by {largest_difference(a, b):.3g}")
    return count, differs


def bits(array: mx.array) -> bytes:
    """Return the bytes of an array."""
    flat = mx.reshape(array, (-1,))
    return np.array(mx.view(flat, mx.uint8)).tobytes() if flat.size else b""


def refusal_of(act: Any) -> Reason | None:
    """Return the reason for which an act is refused, or None where it is not."""
    try:
        act()
    except PrefixRefused as refused:
        return refused.reason
    return None


def _said(native: Any) -> dict[str, Any]:
    """Return what a native cache says of itself; of a list of states, which slots are filled."""
    said = {name: int(getattr(native, name)) for name in _STATED if hasattr(native, name)}
    if isinstance(native, ArraysCache):
        slots: Sequence[mx.array | None] = native.cache
        said["slots"] = [array is not None for array in slots]  # type: ignore[assignment]
    return said


def _names(natives: Sequence[Any]) -> str:
    return ", ".join(_each(natives))


def _each(natives: Sequence[Any]) -> Iterator[str]:
    yield from (type(native).__name__ for native in natives)
