"""Two claims, one record: neither is decided by the other's checks, nor lapses with the other's code."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from evidence.conftest import check, of_other_code, result_of
from mlx_audit.audit.exit_codes import CLAIM_FAILED, HOLDS, UNDECIDED, code_of, is_binding
from mlx_audit.audit.items import VERDICT, failure_of, note_of
from mlx_audit.evidence import CheckResult, Result, decide
from mlx_audit.evidence.codes import DECODE, RESTORE, claim_of, claims_on, needed_codes
from mlx_audit.evidence.digests import prefix_files
from mlx_audit.evidence.environment import backend
from mlx_audit.evidence.recorded import record_results
from mlx_audit.evidence.records import (
    Record,
    RecordError,
    load_record,
    make_record,
    self_digest,
    write_record,
)
from mlx_audit.evidence.results import SCHEMA, ClaimResult
from mlx_audit.evidence.results_file import ResultsError, load_results
from mlx_audit.evidence.standing import Evidence, Standing, evidence_of, standings, state_of
from mlx_audit.manifests import Manifest, find_manifest

STATUSES = ("pass", "fail", "not-run", "not-applicable")
BOTH = sorted(needed_codes() | needed_codes(RESTORE))


def test_whose_checks_are_whose() -> None:
    assert {claim_of(code) for code in BOTH if code.startswith("RST")} == {RESTORE}
    assert {claim_of(code) for code in BOTH if not code.startswith("RST")} == {DECODE}
    assert claim_of("XXX001") == DECODE
    assert needed_codes() & needed_codes(RESTORE) == {"TOP001", "TOP002"}
    assert not any(code.startswith("RST") for code in needed_codes())
    assert (claims_on("TOP002"), claims_on("PAR001"), claims_on("RST001")) == (
        [DECODE, RESTORE],
        [DECODE],
        [RESTORE],
    )


@pytest.mark.parametrize("partial", [False, True])
@pytest.mark.parametrize(("decode", "shared", "restore"), list(itertools.product(STATUSES, repeat=3)))
def test_no_claim_leaks_into_the_other(decode: str, shared: str, restore: str, partial: bool) -> None:
    checks = [check("PAR001", decode), check("TOP001", shared), check("RST001", restore)]
    options: dict[str, Any] = {"limits": ["a limit"], "partial": partial}
    assert decide(checks, **options) == decide(checks[:2], **options)
    found = decide(checks, claim=RESTORE, **options)
    assert found == decide(checks[1:], claim=RESTORE, **options)
    if restore == "fail":
        assert found.name == "not-capable"
    elif partial or restore != "pass" or shared in ("fail", "not-run"):
        assert found.name == "undecided"
    else:
        assert found == ("capable", "1 checks passed")


def test_a_failure_that_a_claim_rests_on_does_not_refute_it() -> None:
    checks = [check("TOP001", "fail", reason="layer 0 is another"), check("RST001")]
    assert decide(checks, claim=RESTORE) == (
        "undecided",
        "it rests on TOP001, which failed: layer 0 is another",
    )
    assert decide([check("TOP001"), check("PAR001")], claim=RESTORE) == ("undecided", "no check was run")


def claimed(decode: Any, restore: Any, *checks: CheckResult) -> Result:
    claims = {DECODE: decide(checks), RESTORE: decide(checks, claim=RESTORE)}
    wanted = {DECODE: decode, RESTORE: restore}
    found = {
        name: ClaimResult(claimed=wanted[name], verdict=verdict.name, reason=verdict.reason)
        for name, verdict in claims.items()
    }
    return result_of(*checks).model_copy(update={"claims": found, "verdict": claims[DECODE].name})


CODES = [
    # claimed, PAR001, RST001, exit code
    (("capable", "capable"), "pass", "pass", HOLDS),
    (("capable", "capable"), "pass", "fail", CLAIM_FAILED),
    (("capable", "capable"), "fail", "pass", CLAIM_FAILED),
    (("capable", "capable"), "pass", "not-run", UNDECIDED),
    (("not-capable", "capable"), "fail", "pass", HOLDS),
    (("not-capable", "capable"), "fail", "fail", CLAIM_FAILED),
    (("capable", "not-capable"), "pass", "fail", HOLDS),
    (("capable", "not-capable"), "pass", "pass", CLAIM_FAILED),
    (("capable", "undecided"), "pass", "fail", HOLDS),
    (("undecided", "capable"), "fail", "pass", HOLDS),
]


@pytest.mark.parametrize(("claims", "decode", "restore", "code"), CODES)
def test_each_claim_counts(claims: tuple[Any, Any], decode: str, restore: str, code: int) -> None:
    assert code_of(claimed(*claims, check("PAR001", decode), check("RST001", restore))) == code


def test_selected_checks_of_one_claim_are_not_asked_of_the_other() -> None:
    result = claimed("not-capable", "capable", check("RST001"))
    assert code_of(result, partial=True) == HOLDS
    assert code_of(claimed("capable", "capable", check("RST001", "fail")), partial=True) == CLAIM_FAILED


def test_a_check_binds_where_its_own_claim_does() -> None:
    result = claimed("not-capable", "capable")
    assert {code: is_binding(result, code) for code in ("PAR001", "TOP001", "RST001")} == {
        "PAR001": False,
        "TOP001": True,
        "RST001": True,
    }
    assert not is_binding(claimed("capable", "undecided"), "RST001")


def test_items_fail_by_their_own_claim() -> None:
    """The items of a variant, as the pytest plugin has them."""
    result = claimed("capable", "capable", check("PAR001"), check("RST001", "fail", reason="stale by 3"))
    assert failure_of("PAR001", [result]) is None
    found = failure_of("RST001", [result])
    assert found is not None
    assert "stale by 3" in found.text
    verdict = failure_of(VERDICT, [result])
    assert verdict is not None
    assert verdict.causes == {"RST001"}
    assert "PAR001" not in verdict.text
    refuted = claimed("not-capable", "capable", check("PAR001", "fail"), check("RST001"))
    assert failure_of(VERDICT, [refuted]) is None
    assert "where the claim is not-capable" in (note_of("PAR001", [refuted]) or "")
    not_asked = refuted.model_copy(update={"claims": {DECODE: refuted.claims[DECODE]}})
    assert failure_of("RST001", [not_asked]) is None


@pytest.fixture
def manifest() -> Manifest:
    found = find_manifest("qwen2")
    assert found is not None
    assert found.variants["full"].claims.prefix_restore == "capable"
    return found


def recorded(manifest: Manifest, **statuses: str) -> Record:
    checks = [check(code, statuses.get(code, "pass")) for code in BOTH]
    return make_record(manifest, [result_of(*checks)], backend(), version("mlx"))


def stand(manifest: Manifest, record: Record, folder: Path) -> dict[str, Standing]:
    """Return how both claims stand by a record that is written and read."""
    write_record(record, folder)
    found = list(standings(evidence_of(manifest, backend(), [folder])))
    return {standing.claim: standing for standing in found}


def states(found: dict[str, Standing]) -> tuple[str, str]:
    return found[DECODE].state, found[RESTORE].state


def test_both_hold_by_one_record(manifest: Manifest, tmp_path: Path) -> None:
    record = recorded(manifest)
    assert record.files["prefix"] == prefix_files()
    found = stand(manifest, record, tmp_path)
    assert states(found) == ("holds", "holds")
    assert found[RESTORE].reason == f"{len(needed_codes(RESTORE)) - 2} checks passed"
    assert found[DECODE].reason == f"{len(needed_codes())} checks passed"


def test_a_record_without_the_checks_proves_no_restore(
    manifest: Manifest, record: Record, tmp_path: Path
) -> None:
    assert "prefix" not in record.digests
    assert '"prefix_restore"' not in record.to_json()
    found = stand(manifest, record, tmp_path)
    assert states(found) == ("holds", "weaker")
    assert found[RESTORE].reason == "the record has no check of restored prefixes"
    assert found[RESTORE].fix == "mlx-audit run qwen2 --record"
    assert found[RESTORE].files == ()


def test_a_failed_restore_leaves_decoding_alone(manifest: Manifest, tmp_path: Path) -> None:
    found = stand(manifest, recorded(manifest, RST004="fail"), tmp_path)
    assert states(found) == ("holds", "contradicted")
    found = stand(manifest, recorded(manifest, PAR001="fail"), tmp_path)
    assert states(found) == ("contradicted", "holds")
    found = stand(manifest, recorded(manifest, RST002="not-run"), tmp_path)
    assert states(found) == ("holds", "weaker")


def test_a_check_that_is_new_weakens_its_own_claim(manifest: Manifest, tmp_path: Path) -> None:
    record = recorded(manifest)
    for result in record.variants["full"].results:
        result.checks = [found for found in result.checks if found.code != "RST003"]
    found = stand(manifest, record, tmp_path)
    assert states(found) == ("holds", "weaker")
    assert "lacks RST003" in found[RESTORE].reason


def test_other_prefix_code_makes_one_claim_stale(manifest: Manifest, tmp_path: Path) -> None:
    file = "mlx_audit/prefix/snapshot.py"
    record = recorded(manifest)
    files = {**record.files["prefix"], file: "0" * 64}
    from mlx_audit.evidence.digests import total

    old = {"digests": {**record.digests, "prefix": total(files)}, "files": {**record.files, "prefix": files}}
    found = stand(manifest, record.model_copy(update=old), tmp_path)
    assert states(found) == ("holds", "stale")
    assert found[RESTORE].reason == f"mlx-audit's prefix reuse changed since: {file} changed"
    assert (found[RESTORE].files, found[DECODE].files) == ((file,), ())


def test_what_both_rest_on_makes_both_stale(manifest: Manifest, tmp_path: Path) -> None:
    for part in ("model", "toolkit", "manifest"):
        found = stand(manifest, of_other_code(recorded(manifest), part), tmp_path)
        assert states(found) == ("stale", "stale")


def test_what_a_record_states_of_restores_follows_from_its_checks(manifest: Manifest, tmp_path: Path) -> None:
    path = write_record(recorded(manifest, RST001="fail"), tmp_path)
    good = json.loads(path.read_text(encoding="utf-8"))
    assert good["variants"]["full"]["prefix_restore"]["verdict"] == "not-capable"
    for change in ({"verdict": "capable", "reason": "8 checks passed"}, None):
        body = json.loads(json.dumps(good))
        full = body["variants"]["full"]
        full["prefix_restore"] = change and {**full["prefix_restore"], **change}
        body["digest"] = self_digest(body)
        path.write_text(json.dumps(body), encoding="utf-8")
        with pytest.raises(RecordError, match="of restored prefixes does not follow from its checks"):
            load_record(path)


def test_files_of_the_prefix_digest_are_held_to_it(manifest: Manifest, tmp_path: Path) -> None:
    path = write_record(recorded(manifest), tmp_path)
    body = json.loads(path.read_text(encoding="utf-8"))
    body["files"]["prefix"]["mlx_audit/prefix/index.py"] = "0" * 64
    body["digest"] = self_digest(body)
    path.write_text(json.dumps(body), encoding="utf-8")
    with pytest.raises(RecordError, match="the digest `prefix` does not follow from its files"):
        load_record(path)


def test_a_record_says_both_in_a_report(manifest: Manifest) -> None:
    record = recorded(manifest, RST001="fail")
    (result,) = record_results(record, manifest).results
    assert {name: claim.verdict for name, claim in result.claims.items()} == {
        DECODE: "capable",
        RESTORE: "not-capable",
    }
    assert result.verdict == "capable"
    (stale,) = record_results(record, manifest, ["the model changed"]).results
    assert {claim.verdict for claim in stale.claims.values()} == {"undecided"}


def test_lists_say_both(manifest: Manifest) -> None:
    evidence = Evidence(manifest, backend(), recorded(manifest, RST001="not-run"))
    assert state_of(evidence, "full") == "capable"
    assert state_of(evidence, "full", RESTORE).startswith("weaker (RST001 was not run")
    assert state_of(replace(evidence, record=None), "full", RESTORE) == "none"


def test_a_results_file_is_held_to_its_checks_claim_by_claim(tmp_path: Path) -> None:
    from mlx_audit.evidence.results import Results

    checks = [check(code, "fail" if code == "RST001" else "pass") for code in BOTH]
    result = claimed("capable", "capable", *checks)
    document = record_results_document(result)
    path = tmp_path / "results.json"
    path.write_text(Results.model_validate(document).to_json(), encoding="utf-8")
    assert load_results(path).results[0].claims[RESTORE].verdict == "not-capable"
    document["results"][0]["claims"][RESTORE]["verdict"] = "capable"
    path.write_text(json.dumps(document), encoding="utf-8")
    with pytest.raises(ResultsError, match="the verdict does not follow from the checks"):
        load_results(path)


def record_results_document(result: Result) -> dict[str, Any]:
    """Return a results document with one result."""
    names = ("mlx_audit", "mlx", "mlx_lm", "python", "platform", "backend")
    environment = {**dict.fromkeys(names, "x"), "compiler": None}
    return {"schema": SCHEMA, "environment": environment, "results": [result.model_dump()]}
