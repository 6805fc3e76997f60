"""Does a claim of a manifest hold by its record? The one rule that sessions, `list` and `gate` go by."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import Literal

from mlx_audit.evidence.codes import DECODE, RESTORE
from mlx_audit.evidence.environment import backend as this_backend
from mlx_audit.evidence.lapse import lapse_of_prefix
from mlx_audit.evidence.records import Record, RecordError, Staleness, find_record, lapse, search_path
from mlx_audit.evidence.results import VerdictName
from mlx_audit.manifests import Manifest
from mlx_audit.models.rope import tiny_name

State = Literal["holds", "missing", "damaged", "stale", "weaker", "contradicted", "undecided"]
"""What became of a claim.

- holds: a valid record proves it.
- missing: there is no record, or none of this variant.
- damaged: the record can't be read, or was changed after it was written.
- stale: what it was made of has changed.
- weaker: it proves less than is claimed, or than is asked today.
- contradicted: it says the opposite.
- undecided: nothing is claimed, or nobody can tell here.
"""

_POSITIVE = ("capable", "limited")
_SUBJECTS = {DECODE: "compiled decoding", RESTORE: "restored prefixes"}
_TINY = tiny_name("", "")
"""Of a variant's main configuration."""


@dataclass(frozen=True)
class Standing:
    """How one claim about a variant stands on one backend.

    Attributes:
        claim: `compiled_decode`, `prefix_restore`, or `rope.` and the RoPE kind.
        claimed: By the manifest.
        verdict: Of the record; None where there is no usable one.
        covered: Variants of a record that lacks this one.
        reason: What decided the state.
        fix: The command that refreshes the record; empty where nothing is to be done.
        files: Relative names of those that changed.
    """

    family: str
    variant: str
    claim: str
    claimed: VerdictName
    backend: str
    state: State
    reason: str
    fix: str = ""
    files: tuple[str, ...] = ()
    verdict: VerdictName | None = None
    covered: tuple[str, ...] = ()

    @property
    def failed(self) -> bool:
        """Whether the claim does not stand; a claim `undecided` moves nothing."""
        return self.state not in ("holds", "undecided")


@dataclass(frozen=True)
class Evidence:
    """What was found of a family's record on one backend."""

    manifest: Manifest
    backend: str
    record: Record | None = None
    damage: str = ""
    lapsed: Staleness = field(default_factory=lambda: Staleness([], []))

    def lapsed_for(self, claim: str) -> Staleness:
        """Return why the record no longer counts for a claim; what restores prefixes concerns that claim alone."""
        record = self.record
        if (
            claim != RESTORE
            or record is None
            or not any(v.speaks_of(RESTORE) for v in record.variants.values())
        ):
            return self.lapsed
        more = lapse_of_prefix(record)
        return Staleness([*self.lapsed.reasons, *more.reasons], [*self.lapsed.files, *more.files])

    @property
    def target(self) -> str:
        """What the command line calls the family."""
        own = self.manifest.module.startswith("./")
        return str(self.manifest.path) if own else self.manifest.family

    @property
    def command(self) -> str:
        """The command that makes the record anew."""
        return f"mlx-audit run {self.target} --record"

    @property
    def fix(self) -> str:
        """What refreshes the record: the command as it is run here, or where else it has to be run."""
        where = "" if self.backend == this_backend() else f" on a machine whose backend is {self.backend}"
        return f"mlx-audit run {self.target}{self._profile} --record{where}"

    @property
    def _profile(self) -> str:
        """The profile of the record that is replaced, so that its successor proves no less."""
        profiles = {v.profile for v in self.record.variants.values()} if self.record is not None else set()
        return f" --profile {profiles.pop()}" if len(profiles) == 1 and profiles != {"quick"} else ""


def evidence_of(manifest: Manifest, backend: str, folders: Sequence[Path]) -> Evidence:
    """Return the record of a family and whether it still counts; damage is kept, not raised."""
    try:
        record = find_record(manifest.family, backend, folders)
    except RecordError as error:
        return Evidence(manifest, backend, damage=f"{error.where}: {_told(error)}")
    if record is None:
        return Evidence(manifest, backend)
    return Evidence(manifest, backend, record, lapsed=lapse(record, manifest, mlx_version=version("mlx")))


def standings(evidence: Evidence) -> Iterator[Standing]:
    """Yield how each claim of a manifest stands: a variant's, then those about its RoPE kinds."""
    for variant, declared in evidence.manifest.variants.items():
        decode = standing(evidence, variant)
        yield decode
        if declared.claims.prefix_restore is not None:
            yield standing(evidence, variant, RESTORE)
        if decode.claimed in _POSITIVE:
            for item in evidence.manifest.rope:
                yield rope_standing(evidence, variant, item.kind, decode)


def standing(evidence: Evidence, variant: str, claim: str = DECODE) -> Standing:
    """Return how the claim stands that a variant is capable of something, or that it is not."""
    claims = evidence.manifest.variants[variant].claims
    claimed = claims.compiled_decode if claim == DECODE else (claims.prefix_restore or "undecided")
    state, reason, verdict = _judge(evidence, variant, claim, claimed)
    return _made(evidence, variant, claim, claimed, state, reason, verdict)


def rope_standing(evidence: Evidence, variant: str, kind: str, decode: Standing | None = None) -> Standing:
    """Return how the claim about a variant under one RoPE kind stands; it needs the variant's own claim.

    Args:
        evidence: Of the family.
        variant: Its name.
        kind: A RoPE kind; one that the manifest does not name is claimed `undecided`.
        decode: The variant's own standing, where it is known.
    """
    manifest = evidence.manifest
    declared = manifest.rope_kinds or ["default"]
    decode = decode or standing(evidence, variant)
    claim = f"rope.{kind}"
    if kind not in declared:
        reason = "claimed undecided" if manifest.rope_claim(kind) else "not claimed"
        return _made(evidence, variant, claim, "undecided", "undecided", reason, None)
    if decode.state != "holds":
        return _made(evidence, variant, claim, "capable", decode.state, decode.reason, decode.verdict)
    assert evidence.record is not None
    if not evidence.record.variants[variant].proves_rope(kind, declared[0]):
        reason = f"the record has no audit of RoPE kind {kind}"
        return _made(evidence, variant, claim, "capable", "weaker", reason, decode.verdict)
    return _made(evidence, variant, claim, "capable", "holds", "audited", decode.verdict)


def record_state(manifest: Manifest, variant: str) -> str:
    """Return the state of a variant's record on this backend, for people: its verdict, or why there is none.

    Reads the working directory too, as the command line does.
    """
    return state_of(evidence_of(manifest, this_backend(), search_path(working_directory=True)), variant)


def state_of(evidence: Evidence, variant: str, claim: str = DECODE) -> str:
    """Return the state of a variant's record, for people: its verdict, or why there is none that counts."""
    found = standing(evidence, variant, claim)
    if found.state == "holds":
        return str(found.verdict)
    if found.state in ("undecided", "missing"):
        return "none"
    return f"{found.state} ({found.reason})"


def _judge(
    evidence: Evidence, variant: str, claim: str, claimed: VerdictName
) -> tuple[State, str, VerdictName | None]:
    """Return the state of a variant's claim, what decided it, and the verdict of the record."""
    record = evidence.record
    if claimed == "undecided":
        return "undecided", "claimed undecided", None
    if evidence.damage:
        return "damaged", evidence.damage, None
    if record is None:
        return "missing", "there is no record", None
    if evidence.lapsed.reasons:
        return "stale", "; ".join(evidence.lapsed.reasons), None
    recorded = record.variants.get(variant)
    if recorded is None:
        return "missing", f"the record covers only {', '.join(record.variants)}", None
    if not recorded.speaks_of(claim):
        return "weaker", f"the record has no check of {_SUBJECTS[claim]}", None
    if reasons := evidence.lapsed_for(claim).reasons:
        return "stale", "; ".join(reasons), None
    verdict = recorded.verdict(claim)
    if verdict.name == "undecided":
        return "weaker", verdict.reason, verdict.name
    if (claimed in _POSITIVE) != (verdict.name in _POSITIVE):
        return "contradicted", f"the record says {verdict.name}: {verdict.reason}", verdict.name
    if (claimed, verdict.name) == ("capable", "limited"):
        return "weaker", f"the record says limited: {verdict.reason}", verdict.name
    if verdict.name in _POSITIVE and not any(result.configuration == _TINY for result in recorded.results):
        return "weaker", "the record has no audit of the tiny configuration", verdict.name
    return "holds", verdict.reason, verdict.name


def _made(
    evidence: Evidence,
    variant: str,
    claim: str,
    claimed: VerdictName,
    state: State,
    reason: str,
    verdict: VerdictName | None,
) -> Standing:
    found = Standing(evidence.manifest.family, variant, claim, claimed, evidence.backend, state, reason)
    fix = evidence.fix if found.failed else ""
    files = tuple(dict.fromkeys(evidence.lapsed_for(claim).files)) if state == "stale" else ()
    covered = tuple(evidence.record.variants) if evidence.record is not None and state == "missing" else ()
    return replace(found, fix=fix, files=files, verdict=verdict, covered=covered)


def _told(error: RecordError) -> str:
    """What is wrong with a record, with what was found; the file and the command are told elsewhere."""
    found = "" if error.found is None else f"; found: {error.found}"
    return f"{error.what}{found}"
