"""Which prefix of a stored entry a query may take up, by policy, and otherwise why not. Pure: no array is touched."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from mlx_audit.prefix.layers import Layer
from mlx_audit.prefix.reasons import PrefixRefused, Reason
from mlx_audit.prefix.rules import has_recurrence, refusal

MARGIN = 16
"""Tokens at the end of the query that the policy `margin` always feeds."""


class Policy(StrEnum):
    """How much of a shared prefix is taken up."""

    BOUNDARY = "boundary"
    """All that is shared, but the last token of the query."""
    MARGIN = "margin"
    """No more than the query without its last 16 tokens; a recurrent stack never replays a whole query."""


@dataclass(frozen=True)
class Plan:
    """What to restore from one entry.

    Attributes:
        prefix: Tokens to restore; 0: run cold.
        suffix: Tokens to feed afterwards, at least one.
        entry: Tokens of the entry's key.
        reason: Why nothing, or less than what is shared, is restored; None: all that is shared.
        where: The layer that decided, where one did.
    """

    prefix: int
    suffix: int
    entry: int
    reason: Reason | None = None
    where: str = ""

    @property
    def hit(self) -> bool:
        """Whether anything is restored."""
        return self.prefix > 0


def plan(
    layers: Sequence[Layer],
    *,
    query: int,
    shared: int,
    policy: Policy = Policy.BOUNDARY,
    minimum: int = 1,
) -> Plan:
    """Plan the restore of one entry.

    Args:
        layers: Of the entry; their position is the length of its key.
        query: Tokens of the query, one or more.
        shared: Tokens at the start that query and key have in common.
        policy: How much of them is wanted.
        minimum: Fewer tokens than these are not worth it.

    Raises:
        PrefixRefused: key-mismatch: more tokens are shared than one of the two has.
    """
    entry = layers[0].position if layers else 0
    if not 0 <= shared <= min(query, entry) or query < 1:
        raise PrefixRefused(
            Reason.KEY_MISMATCH,
            "the query and the key cannot share so many tokens",
            found=shared,
            allowed=f"0 to {min(query, entry)}",
        )

    def cold(reason: Reason, where: str = "") -> Plan:
        return Plan(0, query, entry, reason, where)

    if shared == 0:
        return cold(Reason.MISS)
    recurrent = has_recurrence(layers)
    if policy is Policy.MARGIN:
        if recurrent and shared == query:
            return cold(Reason.EXACT_REPLAY_BYPASS)
        wanted, shortened = min(shared, query - MARGIN), Reason.MARGIN
    else:
        wanted, shortened = min(shared, query - 1), Reason.LAST_TOKEN_FED
    if wanted < max(minimum, 1):
        return cold(Reason.BELOW_MINIMUM)
    refused = refusal(layers, wanted)
    if refused is not None:
        replay = recurrent and shared == query == entry
        return cold(Reason.EXACT_REPLAY_BYPASS if replay else refused.reason, refused.where)
    return Plan(wanted, query - wanted, entry, shortened if wanted < shared else None)


def best(plans: Iterable[Plan], query: int) -> Plan:
    """Return the plan that restores most; of several refusals, that of the longest key which shares a token.

    Args:
        plans: Of all entries that were looked at.
        query: Tokens of the query, for the answer that there was none.
    """
    return max(
        plans,
        key=lambda plan: (plan.prefix, plan.reason is not Reason.MISS, plan.entry),
        default=Plan(0, query, 0, Reason.MISS),
    )
