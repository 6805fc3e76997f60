"""Why a prefix was not reused, or only a shorter one: one code a reason, and the error that carries it."""

from __future__ import annotations

from enum import StrEnum

from mlx_audit.errors import MlxAuditError


class Reason(StrEnum):
    """A stable code; `meaning` is its one line for people."""

    meaning: str

    MISS = "miss", "no stored prefix shares a token with the query"
    EXACT_REPLAY_BYPASS = (
        "exact-replay-bypass",
        "the whole query is stored, and its state cannot step back by a token",
    )
    BELOW_MINIMUM = "below-minimum", "what could be reused is shorter than the minimum"
    RECURRENT_OFF_BOUNDARY = "recurrent-off-boundary", "a recurrent state is usable at its own position only"
    WINDOW_SLID = "window-slid", "rows that the next token may see have left the window"
    WRAPPED_RING = "wrapped-ring", "a full ring has overwritten old rows, so it cannot be cut back"
    PARTIAL_TRIM = "partial-trim", "a layer can give back only some of the tokens, so none are taken"
    LAST_TOKEN_FED = "last-token-fed", "shortened: the last token is always fed, since it makes the logits"
    MARGIN = "margin", "shortened: the policy keeps the last tokens of the query out"
    OFF_GRID = "off-grid", "shortened: from there on, the states were made on another chunk grid"
    UNKNOWN_CLASS = "unknown-class", "a cache class, or an attribute of a cache, without a restore rule"
    BATCHED = "batched", "the cache holds several rows, or counts the padding of one"
    KEY_MISMATCH = "key-mismatch", "the stored tokens are not those of the query"
    POSITION_MISMATCH = "position-mismatch", "a layer holds another number of tokens than the key has"
    OTHER_FINGERPRINT = "other-fingerprint", "weights, tokenizer, settings or namespace differ"
    FORMAT_VERSION = "format-version", "the store was written in another format version"
    UNKNOWN_FIELD = "unknown-field", "the store's manifest states something that this version does not know"
    DAMAGED = "damaged", "a file of the store is cut, altered, missing, or contradicts itself"
    MULTIMODAL = "multimodal", "the prefix ends inside the placeholders of a picture or sound"
    LEASED = "leased", "the entry is in use, so it is not evicted"
    TOO_LARGE = "too-large", "it is larger than the budget or the limit"
    BUSY = "busy", "another process is saving to the same store"

    def __new__(cls, code: str, meaning: str = "") -> Reason:
        """Make a member of a code and its meaning."""
        member = str.__new__(cls, code)
        member._value_ = code
        member.meaning = meaning
        return member


class PrefixRefused(MlxAuditError):
    """A snapshot was not taken, restored, saved or loaded; nothing was changed.

    Args:
        reason: The code; its meaning is the message.
        detail: What is particular to this case.
    """

    def __init__(
        self,
        reason: Reason,
        detail: str = "",
        *,
        where: str | None = None,
        found: object = None,
        allowed: object = None,
        fix: str | None = None,
    ) -> None:
        self.reason = reason
        what = f"{reason.value}: {detail or reason.meaning}"
        super().__init__(what, where=where, found=found, allowed=allowed, fix=fix)
