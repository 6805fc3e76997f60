"""Do the committed claims still hold on what is installed? Which claims are asked, by which records, and the answer."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mlx_audit import resources
from mlx_audit.audit.exit_codes import CLAIM_FAILED, HOLDS, UNDECIDED, combine
from mlx_audit.errors import MlxAuditError
from mlx_audit.evidence.records import search_path
from mlx_audit.evidence.standing import Evidence, Standing, evidence_of, standings
from mlx_audit.manifests import Manifest, load_manifests
from mlx_audit.models.target import resolve_target

SCHEMA = "mlx-audit/gate/1"
BACKENDS = ("cpu", "cuda", "metal")


@dataclass(frozen=True)
class Gated:
    """The evidence of one family on one backend, and how its claims stand by it."""

    evidence: Evidence
    standings: tuple[Standing, ...]

    @property
    def failed(self) -> bool:
        """Whether a claim does not stand."""
        return any(standing.failed for standing in self.standings)


def manifests_of(targets: Sequence[str]) -> list[Manifest]:
    """Return the manifests that targets name, each once; without a target all that are shipped.

    Raises:
        TargetError: there is no such family or manifest.
        ManifestError: a manifest is broken.
        MlxAuditError: a target has no manifest, and so no claim.
    """
    if not targets:
        return load_manifests()
    found = {}
    for text in targets:
        manifest = resolve_target(text, bare=True).manifest
        if manifest is None:
            raise MlxAuditError(
                "no manifest declares this target, so it has no claim",
                where=text,
                allowed="a family that has a manifest, or a manifest",
                fix="mlx-audit list shows the families; mlx-audit draft writes a manifest",
            )
        found[manifest.path.resolve()] = manifest
    return list(found.values())


def folders_of(manifest: Manifest, records: Path | None = None) -> list[Path]:
    """Return the folders in which a family's record is looked for, first to last: where `run --record` writes it.

    Args:
        manifest: Of the family.
        records: The only folder to look in, where the user names one.
    """
    if records is not None:
        return [records]
    if manifest.path.resolve().parent == resources.model_audits().resolve():
        return search_path(working_directory=True)
    named = os.environ.get("MLX_AUDIT_RECORDS")
    return [*([Path(named)] if named else []), manifest.path.parent / "records"]


def gate(manifests: Iterable[Manifest], backends: Sequence[str], records: Path | None = None) -> list[Gated]:
    """Return how every claim stands, by family and then by backend; nothing is run."""
    found = []
    for manifest in manifests:
        for backend in backends:
            evidence = evidence_of(manifest, backend, folders_of(manifest, records))
            found.append(Gated(evidence, tuple(standings(evidence))))
    return found


def mended_in(records: Path, gated: Iterable[Gated]) -> list[Gated]:
    """Return what was found with fixes that write to the folder of records that the user named."""
    place = f"MLX_AUDIT_RECORDS={shlex.quote(str(records))}"
    return [
        replace(
            one,
            standings=tuple(replace(s, fix=f"{place} {s.fix}") if s.fix else s for s in one.standings),
        )
        for one in gated
    ]


def concerned(gated: Iterable[Gated]) -> dict[str, list[str]]:
    """Return, for each file that changed, the families whose records it made stale."""
    found: dict[str, list[str]] = {}
    for one in gated:
        for file in dict.fromkeys(file for standing in one.standings for file in standing.files):
            families = found.setdefault(file, [])
            if one.evidence.manifest.family not in families:
                families.append(one.evidence.manifest.family)
    return found


def exit_code(gated: Iterable[Gated]) -> int:
    """Return 0 when all claims hold, 1 when one failed, 4 when one cannot be decided, 3 when there is none."""
    return combine(_code(standing) for one in gated for standing in one.standings)


def _code(standing: Standing) -> int:
    if standing.state == "undecided":
        return HOLDS if standing.claimed == "undecided" else UNDECIDED
    return CLAIM_FAILED if standing.failed else HOLDS


def document(gated: Sequence[Gated], code: int, *, strict: bool, untouched: Sequence[str]) -> dict[str, Any]:
    """Return what `--json` writes.

    Args:
        gated: What was found.
        code: The exit code.
        strict: Whether audits were run again.
        untouched: Families that were left out because nothing of theirs changed.
    """
    return {
        "schema": SCHEMA,
        "strict": strict,
        "exit_code": code,
        "claims": [_row(standing) for one in gated for standing in one.standings],
        "files": concerned(gated),
        "untouched": list(untouched),
    }


def _row(standing: Standing) -> dict[str, Any]:
    return {
        "family": standing.family,
        "variant": standing.variant,
        "claim": standing.claim,
        "claimed": standing.claimed,
        "backend": standing.backend,
        "state": standing.state,
        "reason": standing.reason,
        "fix": standing.fix or None,
        "files": list(standing.files),
    }
