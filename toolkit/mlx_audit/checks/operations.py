"""Sequences of operations: drawn, told in words, played, and made shorter where one shows a fault."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from hypothesis import strategies as st

from mlx_audit.checks.base import CheckFailed
from mlx_audit.errors import CapacityExceeded, MlxAuditError

CHUNK = 5
"""Tokens a chunk of a prompt: it goes across the usual small window."""

WIDER = 7
"""By how many tokens two capacities differ, between which a text goes to and fro."""

_MOST_COPIES = 3
_LONGEST = 9
"""Operations after the prompt of a drawn sequence."""


class Operation(NamedTuple):
    """One call.

    Attributes:
        name: `step`, `extend`, `trim`, `copy`, `other` (go on with the next copy), `reload` (through a file),
            `hand_over` (to native caches, that many tokens there, and back at another capacity), `overflow` (one
            token more than fits) or `fail` (a layer raises); `prefill` comes first.
        tokens: How many, where it takes any.
    """

    name: str
    tokens: int = 0

    def __str__(self) -> str:
        return f"{self.name} {self.tokens}" if self.tokens else self.name


Operations = Sequence[Operation]


class Player(ABC):
    """Something that operations are played on. Subclasses have one method an operation; `tokens` is its argument.

    An operation for which there is no room, or nothing to take back, does nothing.
    """

    def __init__(self) -> None:
        self.copies = 1
        self.current = 0

    @abstractmethod
    def duplicate(self) -> None:
        """Append a copy of what the next operation acts on."""

    @abstractmethod
    def finish(self) -> None:
        """Look at every copy, and go on with each."""

    def copy(self, _: int) -> None:
        """Branch; the copy waits until it is its turn."""
        if self.copies < _MOST_COPIES:
            self.duplicate()
            self.copies += 1

    def each(self) -> Iterator[None]:
        """Make every copy the current one in turn."""
        for index in range(self.copies):
            self.current = index
            yield

    def other(self, _: int) -> None:
        """Go on with the next copy."""
        self.current = (self.current + 1) % self.copies


def drawn(window: int) -> st.SearchStrategy[list[Operation]]:
    """Return a strategy of sequences whose chunks and trims reach across a window of so many tokens."""
    some = st.integers(1, window + 1)
    counted = [
        st.builds(Operation, st.just(name), some) for name in ("extend", "extend", "trim", "hand_over")
    ]
    bare = [st.just(Operation(name)) for name in ("step", "step", "copy", "other", "hand_over", "reload")]
    refused = [st.just(Operation(name)) for name in ("overflow", "fail")]
    prompt = st.integers(1, 2 * window + 1).map(lambda count: [Operation("prefill", count)])
    more = st.lists(st.one_of(*bare, *counted, *refused), min_size=1, max_size=_LONGEST)
    return st.builds(lambda first, rest: first + rest, prompt, more)


def known(window: int) -> list[list[Operation]]:
    """Return sequences that are never left out: at a ring just full, at one turned long ago, and at a full cache."""
    turned = [
        ("prefill", 2 * window + 1),
        ("step", 0),
        ("trim", 1),
        ("reload", 0),
        ("hand_over", 1),
        ("step", 0),
    ]
    filled = [("prefill", 1), ("extend", window), ("trim", 2), ("hand_over", 0), ("extend", 2), ("fail", 0)]
    texts = [
        [
            *(("prefill", max(1, window - 2)), ("extend", 1), ("step", 0), ("trim", 2), ("copy", 0)),
            *(("step", 0), ("other", 0), ("extend", 2), ("reload", 0), ("step", 0), ("fail", 0), ("step", 0)),
            *(("other", 0), ("hand_over", 2), ("trim", 1), ("step", 0)),
        ],
        [
            *turned,
            ("copy", 0),
            ("extend", window - 1),
            ("other", 0),
            ("step", 0),
            ("hand_over", 0),
            ("trim", 1),
        ],
        [*filled, ("extend", 1000), ("overflow", 0), ("trim", 1), ("overflow", 0), ("step", 0), ("trim", 3)],
    ]
    return [[Operation(name, tokens) for name, tokens in text] for text in texts]


def told(operations: Operations) -> str:
    """Return a sequence in words."""
    return "; ".join(map(str, operations))


def play(player: Player, operations: Operations) -> None:
    """Play a sequence and look at what is left.

    Raises:
        CheckFailed: with the sequence as far as it came.
    """
    done: list[Operation] = []
    try:
        for operation in operations:
            done.append(operation)
            getattr(player, operation.name)(operation.tokens)
        player.finish()
    except (CheckFailed, MlxAuditError) as failure:
        reason = failure.reason if isinstance(failure, CheckFailed) else str(failure)
        names = {"operations": [str(operation) for operation in done]}
        raise CheckFailed(f"{told(done)}: {reason}", where=told(done), figures=names) from failure


def play_shortest(new_player: Callable[[], Player], operations: Operations) -> None:
    """Play a sequence; where it fails, fail with a shorter one from which nothing can be left out.

    Raises:
        CheckFailed: as `play` does.
    """
    try:
        play(new_player(), operations)
    except CheckFailed as failure:
        shortest = failure
    else:
        return
    rest = list(operations[: len(shortest.figures["operations"])])
    for index in reversed(range(len(rest))):
        for shorter in _shorter(rest, index):
            try:
                play(new_player(), shorter)
            except CheckFailed as failure:
                rest, shortest = shorter, failure
                break
    raise shortest


def _shorter(operations: list[Operation], index: int) -> list[list[Operation]]:
    """Return sequences without one operation, or with fewer tokens in it; a prompt stays."""
    before, (name, tokens), after = operations[:index], operations[index], operations[index + 1 :]
    without = [[*before, *after]] if name != "prefill" else []
    fewer = sorted(count for count in {1, tokens // 2, tokens - 1} if 0 < count < tokens)
    return without + [[*before, Operation(name, count), *after] for count in fewer]


def require_refused(call: Callable[[], object], label: str) -> None:
    """Require that a call is refused because its tokens don't fit.

    Raises:
        CheckFailed: nothing was raised.
    """
    try:
        call()
    except CapacityExceeded:
        return
    raise CheckFailed(f"{label} was not refused")
