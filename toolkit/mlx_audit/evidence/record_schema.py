"""What a record holds, and its one text: the same bytes for the same evidence, in an order that reviewers can read."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from mlx_audit.evidence.asked import decide_today
from mlx_audit.evidence.codes import DECODE, RESTORE, own_checks
from mlx_audit.evidence.results import CheckResult, Items, KillSummary, VerdictName
from mlx_audit.evidence.verdict import Verdict, decide
from mlx_audit.models.rope import tiny_name

SCHEMA = "mlx-audit/record/2"

_COLUMNS = 110
"""What is no longer than this stands on one line."""


class RecordedResult(BaseModel):
    """One configuration's checks, without times and paths."""

    model_config = ConfigDict(extra="forbid")

    configuration: str
    checks: Items[CheckResult]


class RecordedClaim(BaseModel):
    """A further claim, as it was made and found; what is found is for readers, as it is of the variant."""

    model_config = ConfigDict(extra="forbid", populate_by_name=True)

    claimed: VerdictName | None = None
    stated: VerdictName = Field(default="undecided", alias="verdict")
    reason: str = ""


class RecordedVariant(BaseModel):
    """All configurations of one variant."""

    model_config = ConfigDict(extra="forbid", populate_by_name=True)

    claimed: VerdictName | None = None
    """What the manifest claimed when the record was made."""
    stated: VerdictName = Field(default="undecided", alias="verdict")
    """For readers of the file; `verdict()` is what counts, and a record that states another one is refused."""
    reason: str = ""
    limits: Items[str] = Field(default_factory=list)
    profile: str
    seed: int
    restore: RecordedClaim | None = Field(default=None, alias="prefix_restore")
    """Of going on from a restored prefix, where it was audited; all else here is of compiled decoding."""
    faults: KillSummary | None = None
    """What became of planted faults, where somebody planted some."""
    results: Items[RecordedResult]

    def verdict(self, claim: str = DECODE) -> Verdict:
        """Recompute the verdict on a claim from the checks; nothing stored is believed.

        A result that lacks a check which exists today proves less than is asked today: it is undecided.
        """
        return combine(self.verdict_of(result, claim) for result in self.results)

    def own_verdict(self, claim: str = DECODE) -> Verdict:
        """Return the verdict of the checks that are there, whatever is asked today: what the record must state."""
        return combine(decide(result.checks, limits=self.limits, claim=claim) for result in self.results)

    def speaks_of(self, claim: str) -> bool:
        """Return whether any check was recorded that decides a claim."""
        return any(own_checks(result.checks, claim) for result in self.results)

    def verdict_of(self, result: RecordedResult, claim: str = DECODE) -> Verdict:
        """Return the verdict on a claim that follows from the checks of one configuration."""
        where = f"{result.configuration}: the record"
        return decide_today(result.checks, limits=self.limits, claim=claim, where=where)

    def conditions(self) -> list[dict[str, Any]]:
        """Return what reading the source found that no audited configuration reaches: `what`, `needs` and `when`.

        The record does not speak of a model that reaches one of them.
        """
        found = {
            str(item): item
            for result in self.results
            for check in result.checks
            for item in check.figures.get("conditional", ())
            if isinstance(item, dict) and item.keys() == {"what", "needs", "when"}
        }
        return list(found.values())

    def proves_rope(self, kind: str, main: str) -> bool:
        """Return whether a RoPE kind was audited; `main` is the one of the variant's main configuration."""
        return any(result.configuration == tiny_name(kind, main) for result in self.results)

    def body(self) -> dict[str, Any]:
        """Return what is written of it: the verdict as it follows from the checks, and no empty values."""
        stated, reason = self.own_verdict()
        body = self.model_dump(by_alias=True, exclude={"results", "faults", "restore"})
        body |= {"verdict": stated, "reason": reason}
        if self.speaks_of(RESTORE):
            claimed = self.restore.claimed if self.restore is not None else None
            found = self.own_verdict(RESTORE)
            body[RESTORE] = {"claimed": claimed, "verdict": found.name, "reason": found.reason}
        if self.faults is not None:
            faults = self.faults.model_dump()
            body["faults"] = {**faults, "killed": _sorted(faults["killed"])}
        body["results"] = [
            {"configuration": result.configuration, "checks": [_check(check) for check in result.checks]}
            for result in self.results
        ]
        return body


class Record(BaseModel):
    """The evidence for one family on one backend."""

    model_config = ConfigDict(extra="forbid", populate_by_name=True)

    schema_: str = Field(default=SCHEMA, alias="schema")
    family: str
    module: str
    backend: str
    mlx: str
    """Minor version, such as `0.32`."""
    adapter: str = ""
    """The class that was registered to adapt the model; empty where the generic adapter served it."""
    variants: dict[str, RecordedVariant]
    digests: dict[str, str]
    """Of `model`, `toolkit` and `manifest`, and of `adapter` where one is registered: they decide when it lapses.
    `prefix` decides when what it says of restored prefixes does, where it says anything."""
    files: dict[str, dict[str, str]] = Field(default_factory=dict)
    """By name of a digest, the digest of each file that it is made of: they name what changed."""
    digest: str = ""
    """Over all the rest: it catches accidents, not forgery."""

    def to_json(self) -> str:
        """Return the canonical text, with the self-digest filled in.

        Keys come in the order of the schema, those of figures and digests in alphabetical order, variants and results
        as they were audited; a check is a line where it fits.
        """
        body = self.model_dump(by_alias=True, include={"schema_", "family", "module", "backend", "mlx"})
        body |= {"adapter": self.adapter} if self.adapter else {}
        body["variants"] = {name: variant.body() for name, variant in self.variants.items()}
        body |= {"digests": _sorted(self.digests), "files": _sorted(self.files)}
        body["digest"] = self_digest(body)
        return _text(body) + "\n"


def combine(verdicts: Iterable[Verdict]) -> Verdict:
    """Return the verdict of a variant from those of its configurations: the weakest one decides."""
    order: tuple[VerdictName, ...] = ("not-capable", "undecided", "limited", "capable")
    return min(
        verdicts, key=lambda verdict: order.index(verdict.name), default=Verdict("undecided", "no result")
    )


def self_digest(body: Mapping[str, Any]) -> str:
    """Return the digest of a record's values, in whatever order and layout they are written."""
    text = json.dumps({k: v for k, v in body.items() if k != "digest"}, sort_keys=True, ensure_ascii=False)
    # Half a surrogate pair, which JSON can spell, has no UTF-8 of its own.
    return f"sha256:{hashlib.sha256(text.encode(errors='surrogatepass')).hexdigest()}"


def _check(check: CheckResult) -> dict[str, Any]:
    body = check.model_dump(exclude_none=True, exclude={"figures", "reason"})
    body |= {"reason": check.reason} if check.reason else {}
    return body | ({"figures": _sorted(check.figures)} if check.figures else {})


def _sorted(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _sorted(value[key]) for key in sorted(value)}
    return [_sorted(item) for item in value] if isinstance(value, list | tuple) else value


def _text(value: Any, indent: str = "") -> str:
    """Return JSON in which what fits stands on one line, and everything else has a line an item."""
    line = json.dumps(value, ensure_ascii=False)
    if len(indent) + len(line) <= _COLUMNS or not isinstance(value, dict | list) or not value:
        return line
    deeper = f"{indent} "
    left, right = "{}" if isinstance(value, dict) else "[]"
    return f"{left}\n{deeper}" + f",\n{deeper}".join(_items(value, deeper)) + f"\n{indent}{right}"


def _items(value: dict[str, Any] | list[Any], indent: str) -> Iterator[str]:
    if isinstance(value, list):
        yield from (_text(item, indent) for item in value)
        return
    for key, item in value.items():
        yield f"{json.dumps(key, ensure_ascii=False)}: {_text(item, indent)}"
