"""What a child tells its parent: one JSON object a line, in the order in which things happen."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from mlx_audit.evidence.results import CheckResult, Environment, Tier, VerdictName


class _Event(BaseModel):
    model_config = ConfigDict(extra="forbid")


class PlannedCheck(_Event):
    """A check that will be run on a subject."""

    code: str
    name: str
    tier: Tier


class PlannedSubject(_Event):
    """One configuration of one variant, and what its result will be made of."""

    variant: str
    configuration: str
    claimed: VerdictName | None = None
    """What the manifest says of it; None where it says nothing."""
    restore: VerdictName | None = None
    """What the manifest says of going on from a restored prefix."""
    limits: list[str] = Field(default_factory=list)
    checks: list[PlannedCheck] = Field(default_factory=list)
    published: bool = False
    """Whether the configuration is one of the manifest's own list."""
    reported: bool = True
    """Whether it has a result of its own; others only lend their numeric checks."""
    borrows: list[int] = Field(default_factory=list)
    """Subjects whose numeric checks count for this one too, the nearest first."""


class Ready(_Event):
    """The child's imports worked: what breaks from now on is the target's doing."""

    kind: Literal["ready"] = "ready"


class Planned(_Event):
    """All subjects of the target; `subject` in later events is an index into them."""

    kind: Literal["planned"] = "planned"
    environment: Environment
    subjects: list[PlannedSubject]
    skipped: list[str] = Field(default_factory=list)
    """Published configurations that are left out, each with the reason."""
    adapter: str = ""
    """Digest of the registered adapter that makes the caches; empty where the generic one does."""


class SubjectStarted(_Event):
    """Work on a subject begins."""

    kind: Literal["subject-started"] = "subject-started"
    subject: int


class CheckStarted(_Event):
    """A check begins: if nothing more comes, this is what broke."""

    kind: Literal["check-started"] = "check-started"
    subject: int
    code: str


class CheckFinished(_Event):
    """A check has a result."""

    kind: Literal["check-finished"] = "check-finished"
    subject: int
    check: CheckResult


class Reproduced(_Event):
    """A failure as a script; at most one a target."""

    kind: Literal["reproduced"] = "reproduced"
    subject: int
    code: str
    script: str = ""
    """Empty where there can be none."""
    meaning: str
    """Of a script that shows no difference; or why there is no script."""


class SubjectFinished(_Event):
    """All checks of a subject have a result."""

    kind: Literal["subject-finished"] = "subject-finished"
    subject: int
    seconds: float = Field(ge=0, allow_inf_nan=False)


class Failed(_Event):
    """The target cannot be audited; nothing more comes."""

    kind: Literal["failed"] = "failed"
    message: str
    exit_code: int = Field(ge=1, le=4)
    """Never 0: what cannot be audited holds nothing."""


class Done(_Event):
    """The target was audited to the end; nothing more comes."""

    kind: Literal["done"] = "done"


Event = (
    Ready
    | Planned
    | SubjectStarted
    | CheckStarted
    | CheckFinished
    | Reproduced
    | SubjectFinished
    | Failed
    | Done
)

_EVENTS: TypeAdapter[Event] = TypeAdapter(Annotated[Event, Field(discriminator="kind")])


def write_event(event: Event) -> bytes:
    """Return an event as a line."""
    return event.model_dump_json().encode() + b"\n"


def read_event(line: bytes) -> Event:
    """Return the event of a line; ValueError when it is none."""
    return _EVENTS.validate_json(line)
