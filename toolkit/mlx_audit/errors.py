"""The error tree: every error says what happened, where, what was found, what is allowed and how to mend it."""

from __future__ import annotations


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
        text = f"{self.where}: {self.what}" if self.where else self.what
        for label, value in (("found", self.found), ("allowed", self.allowed), ("fix", self.fix)):
            if value is not None:
                text += f"; {label}: {value}"
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


class TargetError(MlxAuditError):
    """A TARGET is neither a known family nor a usable manifest, model file, or checkpoint folder."""
