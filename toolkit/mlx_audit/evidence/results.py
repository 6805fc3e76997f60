"""The result schema: one JSON document from which every report is made."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, FailFast, Field

SCHEMA = "mlx-audit/results/1"

Status = Literal["pass", "fail", "not-applicable", "not-run"]
Tier = Literal["static", "trace", "numeric", "checkpoint"]
VerdictName = Literal["capable", "limited", "not-capable", "undecided"]

TIERS: tuple[Tier, ...] = ("static", "trace", "numeric", "checkpoint")


_T = TypeVar("_T")
Items = Annotated[list[_T], FailFast()]
"""A list of anybody's: its first mistake is told, not a million of them."""


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid")


class CheckResult(_Model):
    """What one check found on one subject."""

    code: str
    name: str
    tier: Tier
    status: Status
    reason: str = ""
    """Why it failed, was not run or does not apply; empty when it passed."""
    figures: dict[str, Any] = Field(default_factory=dict)
    """Measured values; keys carry their unit where there is one (`weights_bytes`)."""
    where: str | None = None
    """File:line of the code, or step, layer and slot, that decided."""
    reproduce: str | None = None
    """One command that shows the failure again."""


class ClaimResult(_Model):
    """A claim of the manifest beside what was found."""

    claimed: VerdictName | None
    verdict: VerdictName
    reason: str = ""


class KillSummary(_Model):
    """What became of the faults that were planted in a variant's tiny model."""

    profile: str
    killed: dict[str, Items[str]]
    """By check, the names of the faults that it is named for and saw."""
    survived: Items[str] = Field(default_factory=list)
    """Names of the faults that the check named for them did not see."""
    unshown: Items[str] = Field(default_factory=list)
    """Names of the faults that the model has no place for, or whose check fails anyway."""
    digest: str = ""
    """Over the syntax trees of the checks, the tracer and the faults that made it."""


class Result(_Model):
    """One target × variant × configuration."""

    target: str
    family: str
    variant: str
    configuration: str
    verdict: VerdictName
    reason: str = ""
    limits: Items[str] = Field(default_factory=list)
    claims: dict[str, ClaimResult] = Field(default_factory=dict)
    checks: Items[CheckResult] = Field(default_factory=list)
    digests: dict[str, str] = Field(default_factory=dict)
    seed: int = 0
    profile: str = "quick"
    seconds: float = 0.0
    faults: KillSummary | None = None
    """Of the variant, where its record has one."""


class Environment(_Model):
    """Where the results were made; a record does not say all of it, and leaves the rest empty."""

    mlx_audit: str
    mlx: str
    mlx_lm: str
    python: str
    platform: str
    backend: str
    compiler: str | None


class Results(_Model):
    """The document that `--json` writes."""

    schema_: str = Field(default=SCHEMA, alias="schema")
    environment: Environment
    results: Items[Result]

    model_config = ConfigDict(extra="forbid", populate_by_name=True)

    def to_json(self) -> str:
        """Return the document as indented JSON."""
        return self.model_dump_json(by_alias=True, indent=2) + "\n"
