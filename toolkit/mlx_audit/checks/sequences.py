"""Any order of operations: what only one order of several calls shows, each of which is right by itself."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from mlx_audit.checks.base import Check, Figures
from mlx_audit.checks.operations import Operation, Player, drawn, known, play, play_shortest
from mlx_audit.checks.parts import rings_of, slotted_kinds, specs_of
from mlx_audit.checks.properties import require_always
from mlx_audit.checks.sequenced_caches import CachePlayer
from mlx_audit.checks.sequenced_sessions import Bench, SessionPlayer
from mlx_audit.checks.subject import Subject

_WINDOW = 6
"""What stands for a window where nothing is forgotten."""


class AnyOrder(Check):
    """After any order of operations, each cache holds exactly the tokens of its text.

    What it does:
        Plays sequences of operations, three that are always the same and others that are drawn: a prompt in chunks,
        steps, several tokens at once, trims (which may be refused), copies that go on side by side, a way through a
        file, a hand-over to native caches that read on and are adopted at another capacity, one token more than fits,
        and a layer that raises. First each kind of cache alone, beside a list of numbered tokens: each new token must
        see exactly those that the cache's parameters ask for. Then a session, beside eager decoding that has read only
        the tokens that are held: logits after each call, and at the end every cache of every copy. Calls that are
        refused or fail must change nothing. A sequence that fails is made shorter until nothing can be left out.

    Why:
        Each call may be right by itself and leave behind what the next one stumbles over: a slot that a trim only
        hides, a buffer that copies share until one is trimmed, a ring that is adopted as if it had not turned.

    Example:
        prefill 6; trim 1; extend 2: rotating of 8: at position 5 the mask of query 0 (window None) shows tokens
        [0, 1, 2, 3, 4, 'forgotten', 5], wanted [0, 1, 2, 3, 4, 5]

    How to fix:
        Play the shortest sequence by hand, and look at the state after each of its operations.

    Sources:
        ml-explore/mlx-lm#1776 (a trim after the ring had turned); hypothesis.readthedocs.io, stateful tests
    """

    code = "STA006"
    tier = "numeric"
    requires = ("STA002", "STA003", "STA004", "STA005", "LIF001")
    repeated = False

    def run(self, subject: Subject) -> Figures:
        parts, tally = slotted_kinds(subject), {"sequences": 0}
        for part in parts:
            _require_any_order(subject, partial(CachePlayer, part), part.spec.ring or _WINDOW, tally, 2)
        bench, rings = Bench(subject), rings_of(specs_of(subject))
        _require_any_order(subject, partial(SessionPlayer, bench), rings[0] if rings else _WINDOW, tally, 4)
        return {**tally, "caches": [part.spec.label for part in parts], **bench.comparer.figures()}


def _require_any_order(
    subject: Subject, new_player: Callable[[], Player], window: int, tally: dict[str, int], share: int
) -> None:
    """Play known and drawn sequences, each on a new player."""
    for operations in known(window):
        play_shortest(new_player, operations)
        tally["sequences"] += 1

    def example(operations: list[Operation]) -> None:
        play(new_player(), operations)
        tally["sequences"] += 1

    require_always(subject, {"operations": drawn(window)}, example, share=share)
