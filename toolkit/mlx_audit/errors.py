"""The error tree: every error says what happened, where, what was found, what is allowed and how to mend it."""

from __future__ import annotations

import re

MOST_SHOWN = 2_000
"""Characters of one piece of foreign text that people are shown."""

MOST_KEPT = 1 << 16
"""Characters of one piece of foreign text that results keep."""

# Controls of terminals, line breaks of any kind, overrides of the writing direction, and halves of surrogate pairs.
_UNSAFE = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
_HALVES = re.compile("[\ud800-\udfff]")
_NAMES = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}


def clean(value: object, limit: int = MOST_SHOWN) -> str:
    """Return a value as one line of text that is safe on a terminal: controls escaped, and not too long."""
    return _UNSAFE.sub(_escaped, _cut(text_of(value), limit))


def storable(value: object, limit: int = MOST_KEPT) -> str:
    """Return a value as text that UTF-8 and JSON can carry, otherwise as it is; cut where it is too long."""
    return _HALVES.sub(_escaped, _cut(text_of(value), limit))


def text_of(value: object) -> str:
    """Return `str(value)`, also for an exception of foreign code whose own `__str__` fails."""
    try:
        return str(value)
    except Exception:
        return f"<a {type(value).__name__} that has no text>"


def describe(error: BaseException) -> str:
    """Return the type and message of an exception of foreign code."""
    return f"{type(error).__name__}: {storable(error)}"


def _cut(text: str, limit: int) -> str:
    """Keep the beginning and the end: after a long path stands what is wrong with it."""
    if len(text) <= limit:
        return text
    tail = limit // 4
    return f"{text[: limit - tail]}… ({len(text) - limit:,} more characters) …{text[-tail:]}"


def _escaped(match: re.Match[str]) -> str:
    character = match.group()
    code = ord(character)
    return _NAMES.get(character) or (f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}")


class MlxAuditError(Exception):
    """Base of all errors that mlx-audit raises on purpose.

    Args:
        what: One clause that says what went wrong.
        where: File:line:column, a manifest key, a layer or an argument name.
        found: The value met.
        allowed: What would have been accepted.
        fix: What to do about it, a command where there is one.
    """

    exit_code = 2

    def __init__(
        self,
        what: str,
        *,
        where: str | None = None,
        found: object = None,
        allowed: object = None,
        fix: str | None = None,
    ) -> None:
        self.what = what
        self.where = where
        self.found = found
        self.allowed = allowed
        self.fix = fix
        super().__init__(what)

    def __str__(self) -> str:
        # Only the list of a file's problems has more lines than one.
        what = "\n".join(clean(line) for line in self.what.split("\n"))
        text = f"{clean(self.where)}: {what}" if self.where else what
        for label, value in (("found", self.found), ("allowed", self.allowed), ("fix", self.fix)):
            if value is not None:
                text += f"; {label}: {clean(value)}"
        return text


class CapacityExceeded(MlxAuditError):
    """More tokens were asked for than the fixed capacity holds; nothing was dispatched or changed."""


class ShapeMismatch(MlxAuditError):
    """Tokens or arrays have a shape, dtype or value that the session or cache was not made for."""


class NotCompileCapable(MlxAuditError):
    """The model has no proof that its compiled decoding is right; the message says which command makes one."""

    exit_code = 1


class HostState(MlxAuditError):
    """A cache keeps its position, or other decode state, where a compiled graph cannot carry it."""


class SessionBroken(MlxAuditError):
    """An evaluation failed after the session had given its buffers away; the session is closed for good."""


class SessionMisuse(MlxAuditError):
    """A session method was called in a state in which it has no meaning, such as a step before any prefill."""


class SavedSessionInvalid(MlxAuditError):
    """A saved session is damaged, of another format version, or belongs to another model."""


class EnvironmentUnfit(MlxAuditError):
    """This machine, as it is set up, cannot decide anything."""

    exit_code = 4


class TargetError(MlxAuditError):
    """A TARGET is neither a known family nor a usable manifest, model file, or checkpoint folder."""
