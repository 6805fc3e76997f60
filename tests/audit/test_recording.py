"""What `--record` stores, and when it refuses to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from command import SharedRun, shared_run
from mlx_audit import resources
from mlx_audit.audit.fault_summaries import record_summaries, require_record
from mlx_audit.audit.kill_matrix import KillMatrix, Planted
from mlx_audit.audit.recording import NotRecorded, record, record_folder, require_recordable, stable
from mlx_audit.audit.request import Options, Request
from mlx_audit.audit.runner import Outcome
from mlx_audit.evidence.digests import ordered, total
from mlx_audit.evidence.records import load_record, write_record
from mlx_audit.evidence.results import CheckResult, Result
from mlx_audit.faults import FAULTS
from mlx_audit.models.target import resolve_target
from model_files import write_config, write_manifest, write_model

pytestmark = pytest.mark.xdist_group("shared_run")


@pytest.fixture(scope="module")
def shared() -> SharedRun:
    return shared_run()


def outcome(shared: SharedRun, family: str, results: list[Result] | None = None) -> Outcome:
    own = [result for result in shared.results.results if result.family == family]
    request = Request.of(resolve_target(family), Options())
    return Outcome(request, own if results is None else results, shared.results.environment, [], None)


def test_only_claims_that_hold_are_recorded(shared: SharedRun, tmp_path: Path) -> None:
    path = record(outcome(shared, "llama"), tmp_path)
    assert path == tmp_path / "llama" / f"{shared.results.environment.backend}.json"
    stored = load_record(path)
    assert list(stored.variants) == ["full", "sliding"]
    for variant in stored.variants.values():
        names = [result.configuration for result in variant.results]
        assert "tiny" in names
        assert "tiny+dynamic" not in names
        assert variant.verdict().name == "capable"


def test_a_record_has_no_times_and_no_paths(shared: SharedRun, tmp_path: Path) -> None:
    text = record(outcome(shared, "qwen2"), tmp_path).read_text(encoding="utf-8")
    assert "_seconds" not in text
    assert "_measured" not in text
    assert str(resources.model_audits()) not in text


def test_measured_figures_make_no_difference(shared: SharedRun, tmp_path: Path) -> None:
    first = outcome(shared, "qwen2")
    later = [result.model_copy(deep=True, update={"seconds": 99.0}) for result in first.results]
    for result in later:
        result.checks[0].figures |= {"step_seconds": 5.0, "inner": {"peak_bytes_measured": 7}}
    first_path = record(first, tmp_path / "a")
    for result in first.results:
        result.checks[0].figures |= {"inner": {}}
    first_path = record(first, tmp_path / "a")
    assert first_path.read_bytes() == record(outcome(shared, "qwen2", later), tmp_path / "b").read_bytes()


def test_folders_of_this_machine_are_left_out() -> None:
    """A file keeps its name; what is relative, or no path, stays."""
    figures = {
        "what": "/home/somebody/mlx_lm/models/llama.py:3:1 and '/tmp/x/y.py'",
        "kept": "mlx_lm/models/rope_utils.py:260:19 max()/min(): a / b, //, 3 / 4 and ~/x.py",
        "deep": [{"at": "(/usr/lib/python3/ast.py)"}],
    }
    result = CheckResult(code="SRC001", name="n", tier="static", status="fail", figures=figures)
    found = stable(result.model_copy(update={"reason": "at /elsewhere/z/model.py:4"}))
    assert found.reason == "at model.py:4"
    assert found.figures == {
        "what": "llama.py:3:1 and 'y.py'",
        "kept": "mlx_lm/models/rope_utils.py:260:19 max()/min(): a / b, //, 3 / 4 and x.py",
        "deep": [{"at": "(ast.py)"}],
    }


def test_committed_records_hold_no_folder_and_no_time() -> None:
    paths = sorted((resources.model_audits() / "records").glob("*/*.json"))
    assert paths
    for path in paths:
        stored = load_record(path)
        assert stored.to_json() == path.read_text(encoding="utf-8"), "canonical"
        for variant in stored.variants.values():
            for check in (check for result in variant.results for check in result.checks):
                assert stable(check) == check, f"{path}: {check.code}"


def test_what_planted_faults_showed_is_kept_as_long_as_the_code_is_the_same(
    shared: SharedRun, tmp_path: Path
) -> None:
    """A new audit does not lose it; a change of the model does."""
    path = record(outcome(shared, "qwen2"), tmp_path)
    planted = [
        Planted(FAULTS[name], "qwen2 full", fate, {}, "")
        for name, fate in zip(sorted(FAULTS)[:4], ("killed", "survived", "no place", "blind"), strict=True)
    ]
    matrix = KillMatrix(stacks=["qwen2 full"], planted=planted)
    request = outcome(shared, "qwen2").request
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLX_AUDIT_RECORDS", str(tmp_path))
        assert "faults in full" in record_summaries(matrix, request, "quick")
    kept = load_record(path).variants["full"].faults
    first, second, third, fourth = sorted(FAULTS)[:4]
    assert kept is not None
    assert kept.killed == {FAULTS[first].by: [first]}
    assert (kept.survived, kept.unshown, kept.profile) == ([second], sorted([third, fourth]), "quick")
    assert kept.digest.startswith("sha256:")

    record(outcome(shared, "qwen2"), tmp_path)
    assert load_record(path).variants["full"].faults == kept
    stored = load_record(path)
    stored.files["model"]["mlx_lm/models/base.py"] = "0" * 64
    stored.digests["model"] = total(ordered(stored.module, stored.files["model"]))
    write_record(stored, tmp_path)
    assert load_record(path).variants["full"].faults == kept
    record(outcome(shared, "qwen2"), tmp_path)
    assert load_record(path).variants["full"].faults is None


@pytest.mark.parametrize("sick", ["unhealthy", "failed"])
def test_no_summary_is_kept_of_a_sick_model(shared: SharedRun, tmp_path: Path, sick: str) -> None:
    path = record(outcome(shared, "qwen2"), tmp_path)
    name = sorted(FAULTS)[0]
    matrix = KillMatrix(["qwen2 full"], [Planted(FAULTS[name], "qwen2 full", "killed", {}, "")])
    setattr(matrix, sick, {"qwen2 full": ["PAR001"]} if sick == "unhealthy" else ["qwen2: it died"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLX_AUDIT_RECORDS", str(tmp_path))
        assert "no variant" in record_summaries(matrix, outcome(shared, "qwen2").request, "quick")
    assert load_record(path).variants["full"].faults is None


def test_faults_need_a_record_to_be_kept_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLX_AUDIT_RECORDS", str(tmp_path))
    with pytest.raises(NotRecorded, match="there is no record that could hold these faults"):
        require_record(resolve_target("qwen2"))


def test_a_claim_that_does_not_hold_leaves_the_old_record(shared: SharedRun, tmp_path: Path) -> None:
    path = record(outcome(shared, "qwen2"), tmp_path)
    before = path.read_bytes()
    results = [result.model_copy(deep=True) for result in outcome(shared, "qwen2").results]
    results[0].claims["compiled_decode"].verdict = "not-capable"
    with pytest.raises(NotRecorded, match="a claim does not hold"):
        record(outcome(shared, "qwen2", results), tmp_path)
    assert path.read_bytes() == before


def test_a_record_is_of_the_adapter_that_was_audited(shared: SharedRun, tmp_path: Path) -> None:
    results = [result.model_copy(deep=True) for result in outcome(shared, "qwen2").results]
    results[1].digests["adapter"] = "sha256:of one that only the child has found"
    with pytest.raises(NotRecorded, match="another adapter was audited"):
        record(outcome(shared, "qwen2", results), tmp_path)
    assert not list(tmp_path.rglob("*.json"))


def test_without_claims_there_is_nothing_to_record(shared: SharedRun, tmp_path: Path) -> None:
    undecided = [r.model_copy(deep=True) for r in outcome(shared, "llama").results if r.variant == "sliding"]
    for result in undecided:
        for claim in result.claims.values():
            claim.claimed = "undecided"
    with pytest.raises(NotRecorded, match="no claim"):
        record(outcome(shared, "llama", undecided), tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"only": ["TRC001"]}, "only some tiers"),
        ({"tiers": ["trace"]}, "only some tiers"),
        ({"dtype": "bfloat16"}, "float32"),
    ],
)
def test_a_part_is_refused_before_any_work(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(NotRecorded, match=reason) as refused:
        require_recordable(Request.of(resolve_target("qwen2"), Options(**options)))
    assert refused.value.exit_code == 2


def test_a_configuration_or_a_file_is_refused(tmp_path: Path) -> None:
    config = write_config(tmp_path)
    with pytest.raises(NotRecorded, match="single configuration"):
        require_recordable(Request.of(resolve_target("llama", config), Options(), config))
    model = write_model(tmp_path, "mine")
    with pytest.raises(NotRecorded):
        require_recordable(Request.of(resolve_target(str(model), config), Options(), config))


def test_where_records_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLX_AUDIT_RECORDS", raising=False)
    monkeypatch.chdir(tmp_path)
    llama = Request.of(resolve_target("llama"), Options())
    assert record_folder(llama) == resources.model_audits() / "records"
    (tmp_path / "model_audits").mkdir()
    assert record_folder(llama) == Path("model_audits/records")
    own = llama.model_copy(update={"manifest": tmp_path / "own" / "mine.yaml"})
    assert record_folder(own) == tmp_path / "own" / "records", "beside a manifest of one's own"
    monkeypatch.setenv("MLX_AUDIT_RECORDS", str(tmp_path / "mine"))
    assert record_folder(own) == record_folder(llama) == tmp_path / "mine"


def test_no_record_is_made_of_what_no_digest_covers(tmp_path: Path) -> None:
    """A module that the model file imports could be changed, and the record would stay fresh."""
    own = write_model(tmp_path, "mine")
    request = Request.of(resolve_target("qwen2"), Options()).model_copy(
        update={"manifest": write_manifest(tmp_path, "mine")}
    )
    require_recordable(request)
    own.write_text(f"import outside\n{own.read_text(encoding='utf-8')}", encoding="utf-8")
    with pytest.raises(NotRecorded, match="import outside") as refused:
        require_recordable(request)
    assert "move that code into the model's file" in str(refused.value)
