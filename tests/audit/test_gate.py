"""The gate's rule on changed code, changed claims and new audits; nothing is run here."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from command import SharedRun, shared_run
from gated import copy_of_mlx_lm, edit, own_family
from mlx_audit.audit.gate import Gated, concerned, exit_code, folders_of, gate, manifests_of
from mlx_audit.audit.gate_changes import NotInstalled, UnknownRevision, changed_since, touched
from mlx_audit.audit.gate_strict import differences, figures_differ
from mlx_audit.audit.recording import is_claimed, record
from mlx_audit.audit.request import Options, Request
from mlx_audit.audit.runner import Outcome
from mlx_audit.errors import MlxAuditError
from mlx_audit.evidence import digests
from mlx_audit.evidence.records import RecordedVariant, load_record, record_path, self_digest
from mlx_audit.evidence.results import Result
from mlx_audit.manifests import Manifest, find_manifest, load_manifest, load_manifests
from mlx_audit.models.target import resolve_target

pytestmark = pytest.mark.xdist_group("shared_run")


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return copy_of_mlx_lm(tmp_path_factory.mktemp("mlx-lm"))


@pytest.fixture
def models(scratch: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of a copy of mlx-lm's models, which stands for the installed one."""
    monkeypatch.setattr(digests, "mlx_lm_models", lambda: scratch)
    return scratch


def states(gated: list[Gated]) -> dict[tuple[str, str, str], str]:
    return {(s.family, s.variant, s.claim): s.state for one in gated for s in one.standings}


def test_one_character_names_the_file_and_the_families(models: Path) -> None:
    """In a model its own family; in a helper every family that imports it. Put back, all hold again."""
    manifests = load_manifests()
    assert exit_code(gate(manifests, ["cpu"])) == 0

    edit(models / "qwen2.py", "self.n_heads = n_heads = args", "self.n_heads = m_heads = args")
    found = gate(manifests, ["cpu", "cuda"])
    assert exit_code(found) == 1
    assert concerned(found) == {"mlx_lm/models/qwen2.py": ["qwen2", "qwen2_vl"]}
    (stale,) = {s.reason for one in found for s in one.standings if s.failed and s.family == "qwen2"}
    assert stale == "the source of mlx_lm.models.qwen2 changed since: mlx_lm/models/qwen2.py changed"
    edit(models / "qwen2.py", "self.n_heads = m_heads = args", "self.n_heads = n_heads = args")

    edit(models / "rope_utils.py", "base: float = 10000", "base: float = 10001")
    found = gate(manifests, ["cpu"])
    (families,) = concerned(found).values()
    sources = {m.family: (models / f"{m.module.rpartition('.')[2]}.py").read_text() for m in manifests}
    direct = {family for family, source in sources.items() if "rope_utils" in source}
    assert direct <= set(families)
    assert "mamba2" not in families
    assert {s.family for one in found for s in one.standings if s.failed} == set(families)
    edit(models / "rope_utils.py", "base: float = 10001", "base: float = 10000")
    assert exit_code(gate(manifests, ["cpu"])) == 0


def test_a_comment_changes_nothing(models: Path) -> None:
    edit(models / "mamba2.py", "class ModelArgs", "# a remark\nclass ModelArgs")
    edit(models / "phi.py", "hidden_size", "hiden_size")  # of no family that has a manifest
    assert exit_code(gate(load_manifests(), ["cpu"])) == 0


def of_qwen2(**claims: Any) -> Manifest:
    """Return the manifest of qwen2 with other claims."""
    return claiming("qwen2", claims)


def claiming(family: str, claims: dict[str, Any]) -> Manifest:
    manifest = find_manifest(family)
    assert manifest is not None
    changed = {
        name: variant.model_copy(update={"claims": variant.claims.model_copy(update=claims)})
        for name, variant in manifest.variants.items()
    }
    return manifest.model_copy(update={"variants": changed})


@pytest.mark.parametrize(
    ("claims", "state", "reason"),
    [
        ({"compiled_decode": "not-capable"}, "contradicted", "the record says capable"),
        ({"compiled_decode": "undecided"}, "undecided", "claimed undecided"),
        ({"compiled_decode": "limited"}, "holds", "checks passed"),
    ],
)
def test_a_claim_that_was_changed(claims: dict[str, Any], state: str, reason: str) -> None:
    first = gate([of_qwen2(**claims)], ["cpu"])[0].standings[0]
    assert (first.state, first.claimed) == (state, claims["compiled_decode"])
    assert reason in first.reason


def test_a_claim_that_no_record_speaks_of_is_not_proved() -> None:
    claimed = claiming("lfm2", {"prefix_restore": "capable"})
    found = {claim: state for (_, _, claim), state in states(gate([claimed], ["cpu"])).items()}
    assert found["prefix_restore"] == "weaker"
    assert found["compiled_decode"] == "holds"


def test_a_missing_a_damaged_and_a_misplaced_record(tmp_path: Path) -> None:
    manifest = load_manifest(own_family(tmp_path))
    assert exit_code(gate([manifest], ["cpu"])) == 0
    (missing, *_) = gate([manifest], ["metal"])[0].standings
    assert (missing.state, missing.reason) == ("missing", "there is no record")
    assert missing.fix == f"mlx-audit run {manifest.path} --record on a machine whose backend is metal"
    path = record_path(folders_of(manifest)[0], "mine", "cpu")
    copy = record_path(folders_of(manifest)[0], "mine", "metal")
    copy.write_bytes(path.read_bytes())
    assert "another family or backend" in gate([manifest], ["metal"])[0].standings[0].reason
    path.write_text(path.read_text(encoding="utf-8").replace('"capable"', '"limited"', 1), encoding="utf-8")
    found = gate([manifest], ["cpu"])
    assert {s.state for s in found[0].standings} == {"damaged"}
    assert exit_code(found) == 1
    assert "changed after it was written" in found[0].standings[0].reason


def forged(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change a record as somebody does who knows the self-digest."""
    data = json.loads(path.read_text(encoding="utf-8"))
    change(data["variants"]["full"])
    data["digest"] = self_digest(data)
    path.write_text(json.dumps(data), encoding="utf-8")


def test_a_record_that_lacks_a_check_or_a_rope_kind_is_weaker(tmp_path: Path) -> None:
    manifest = load_manifest(own_family(tmp_path))
    path = record_path(folders_of(manifest)[0], "mine", "cpu")
    whole = path.read_bytes()

    def without(variant: dict[str, Any]) -> None:
        checks = variant["results"][0]["checks"]
        del checks[next(i for i, check in enumerate(checks) if check["code"] == "TRC001")]
        variant["reason"] = f"{len(checks)} checks passed"

    forged(path, without)
    first = gate([manifest], ["cpu"])[0].standings[0]
    assert (first.state, first.reason) == ("weaker", "tiny: the record lacks TRC001")
    path.write_bytes(whole)
    two = manifest.model_copy(update={"rope": [*manifest.rope, *of_qwen2().rope[1:]]})
    # The digest is of the file, so that the record is fresh; what is claimed of the kinds is more.
    found = states(gate([two], ["cpu"]))
    assert found["mine", "full", "rope.linear"] == "weaker"
    assert found["mine", "full", "rope.dynamic"] == "undecided"
    assert found["mine", "full", "compiled_decode"] == "holds"
    assert exit_code(gate([two], ["cpu"])) == 1


def test_a_target_without_a_claim_is_refused(tmp_path: Path) -> None:
    with pytest.raises(MlxAuditError, match="no such target"):
        manifests_of(["no_such_family"])
    with pytest.raises(MlxAuditError, match="no manifest declares this target") as refused:
        manifests_of(["olmo2"])
    assert "--config" not in str(refused.value.fix), "gate has no such option"
    assert [manifest.family for manifest in manifests_of(["llama", "llama", "qwen2"])] == ["llama", "qwen2"]


# What a new audit must find.


@pytest.fixture(scope="module")
def audited(tmp_path_factory: pytest.TempPathFactory) -> tuple[RecordedVariant, dict[str, Result]]:
    """Return what a real audit of qwen2 records, and its results."""
    shared: SharedRun = shared_run()
    own = [result for result in shared.results.results if result.family == "qwen2"]
    request = Request.of(resolve_target("qwen2"), Options())
    folder = tmp_path_factory.mktemp("records")
    path = record(Outcome(request, own, shared.results.environment, [], None), folder)
    return load_record(path).variants["full"], {r.configuration: r for r in own if is_claimed(r)}


def test_the_same_audit_finds_the_same(audited: tuple[RecordedVariant, dict[str, Result]]) -> None:
    assert list(differences(*audited)) == []


def test_whatever_a_forger_changed_is_found(audited: tuple[RecordedVariant, dict[str, Result]]) -> None:
    """As if the forger had written a record of something better than what the audit finds."""
    variant, results = audited
    first = variant.results[0].configuration

    def found(change: Callable[[RecordedVariant], Any]) -> str:
        copy = variant.model_copy(deep=True)
        change(copy)
        return "; ".join(differences(copy, results))

    def check(copy: RecordedVariant, code: str) -> Any:
        return next(c for c in copy.results[0].checks if c.code == code)

    assert "PAR001 says pass, recorded is not-applicable" in found(
        lambda copy: setattr(check(copy, "PAR001"), "status", "not-applicable")
    )
    assert f"{first} is capable" in found(lambda copy: setattr(check(copy, "PAR001"), "status", "fail"))
    hidden = found(lambda copy: setattr(check(copy, "PAR001"), "tier", "checkpoint"))
    assert "recorded is ('checkpoint', " in hidden
    assert "recorded is ('numeric', 'All is well')" in found(
        lambda copy: setattr(check(copy, "PAR001"), "name", "All is well")
    )
    assert "TRC001 is not recorded" in found(
        lambda copy: copy.results[0].checks.remove(check(copy, "TRC001"))
    )
    assert "SRC001 consumers is 6, recorded is 5" in found(
        lambda copy: check(copy, "SRC001").figures.update(consumers=5)
    )
    assert f"{first} is not recorded" in found(lambda copy: copy.results.pop(0))
    assert "other limits" in found(lambda copy: copy.limits.append("none"))
    extra = variant.results[0].model_copy(update={"configuration": "invented"})
    assert "invented is recorded, and no longer audited" in found(lambda copy: copy.results.append(extra))


@pytest.mark.parametrize(
    ("recorded", "now", "told"),
    [
        ({"n": 4}, {"n": 4}, None),
        ({"n": 4}, {"n": 5}, "n is 5, recorded is 4"),
        ({"n": 1}, {"n": True}, "n is True, recorded is 1"),
        ({"n": 4}, {}, "n is recorded, and was not measured"),
        ({}, {"n": 4}, "n is not recorded"),
        ({"names": ["a", "b"]}, {"names": ["b", "a"]}, "names[0] is 'b', recorded is 'a'"),
        ({"names": ["a"]}, {"names": ["a", "b"]}, "names is ['a', 'b'], recorded is ['a']"),
        ({"e": 2e-4}, {"e": 1.9e-3}, None),
        ({"e": 2e-4}, {"e": 2.1e-3}, "e is 0.0021, recorded is 0.0002"),
        ({"e": 2e-3}, {"e": 1e-4}, "e is 0.0001, recorded is 0.002"),
        ({"e": 0.0}, {"e": 9e-6}, None),
        ({"e": 0.0}, {"e": 2e-5}, "e is 2e-05, recorded is 0.0"),
        ({"class": "exact", "e": 0.0}, {"class": "exact", "e": 1e-9}, "e is 1e-09, recorded is 0.0"),
        ({"a": {"class": "exact", "e": 0.0}}, {"a": {"class": "exact", "e": 1e-9}}, "a.e is 1e-09"),
        ({"class": "exact", "e": 0.0}, {"class": "kernel", "e": 0.0}, "class is 'kernel'"),
        ({"e": 0.5}, {"e": float("nan")}, "e is nan"),
        ({"e": 0.5}, {"e": -0.5}, "e is -0.5"),
    ],
)
def test_figures(recorded: Any, now: Any, told: str | None) -> None:
    text = "; ".join(figures_differ(recorded, now))
    assert told in text if told is not None else text == ""


# What a change touches.


def git(folder: Path, *arguments: str) -> None:
    subprocess.run(
        ["git", "-c", "user.name=n", "-c", "user.email=e@x", "-c", "commit.gpgsign=false", *arguments],
        cwd=folder,
        check=True,
        capture_output=True,
    )


@pytest.fixture(scope="module")
def fork(scratch: Path) -> Path:
    """Return a repository that holds a copy of mlx-lm, two families of its own, and their records."""
    root = scratch.parent.parent
    (root / "mine").mkdir()
    own_family(root / "mine", name="one")
    own_family(root / "mine", name="two")
    git(root, "init", "-q")
    git(root, "add", ".")
    git(root, "commit", "-q", "-m", "start")
    return root


def touches(fork: Path, revision: str = "HEAD") -> list[str]:
    """Return which of the fork's families, qwen2 and llama its changes touch."""
    changed = changed_since(revision, fork)
    manifests = [load_manifest(fork / "mine" / "one.yaml"), load_manifest(fork / "mine" / "two.yaml")]
    manifests += [m for m in load_manifests() if m.family in ("mamba2", "qwen2")]
    gated = gate(manifests, ["cpu"])
    return [
        one.evidence.manifest.family
        for one in gated
        if touched(one.evidence, changed, folders_of(one.evidence.manifest))
    ]


def test_what_touches_whom(fork: Path, models: Path) -> None:
    assert touches(fork) == []
    edit(models / "mamba2.py", "class Model", "# seen by git, whatever it says\nclass Model")
    assert touches(fork) == ["mamba2"]
    git(fork, "add", ".")
    assert touches(fork) == ["mamba2"], "staged"
    git(fork, "commit", "-q", "-m", "mamba2")
    assert touches(fork) == []
    assert touches(fork, "HEAD~1") == ["mamba2"], "committed"
    (fork / "README").write_text("new and of nobody")
    (fork / "mine" / "records" / "two" / "notes.txt").write_text("new and of nobody")
    assert touches(fork) == []
    edit(fork / "mine" / "one.yaml", "family: one", "family: one ")
    assert touches(fork) == ["one"], "its manifest"
    git(fork, "checkout", "-q", "mine/one.yaml")
    record_path(fork / "mine" / "records", "two", "cpu").unlink()
    assert touches(fork) == ["two"], "its record"
    git(fork, "checkout", "-q", "mine")
    (models / "rope_utils.py").rename(models / "rope_tools.py")
    assert {"qwen2", "one", "two"} <= set(touches(fork)), (
        "a helper that is gone is still named by the records"
    )
    (models / "rope_tools.py").rename(models / "rope_utils.py")


def test_what_was_installed_as_a_copy(fork: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`pip install .` copies: a change still touches its family, and a copy without the change is refused."""
    installed, own = tmp_path / "mlx_lm" / "models", fork / "mlx_lm" / "models" / "mamba2.py"
    shutil.copytree(own.parent, installed)
    monkeypatch.setattr(digests, "mlx_lm_models", lambda: installed)
    assert touches(fork) == []
    edit(own, "class Model", "# not installed yet\nclass Model")
    with pytest.raises(NotInstalled, match="not what changed here") as refused:
        touches(fork)
    assert (refused.value.exit_code, refused.value.where) == (2, str(own.resolve()))
    shutil.copy(own, installed)
    assert touches(fork) == ["mamba2"]
    own.unlink()
    with pytest.raises(NotInstalled):
        touches(fork)
    (installed / "mamba2.py").unlink()
    assert touches(fork) == ["mamba2"], "gone from both"
    git(fork, "checkout", "-q", "mlx_lm")


def test_our_own_code_touches_everybody(fork: Path, models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlx_audit.audit.gate_changes.package", lambda: fork / "tool")
    parts = ("caches", "checks", "prefix", "models", "audit", "evidence")
    for part, everybody in (*((part, True) for part in parts), ("reports", False), ("cli", False)):
        (fork / "tool" / part).mkdir(parents=True)
        (fork / "tool" / part / "new.py").write_text("")
        assert (len(touches(fork)) == 4) is everybody, part
        (fork / "tool" / part / "new.py").unlink()


@pytest.mark.parametrize("revision", ["", "--output=x", "-p", "no-such-branch", "HEAD:README", "HEAD..HEAD"])
def test_a_revision_that_is_none(fork: Path, revision: str) -> None:
    with pytest.raises(UnknownRevision) as refused:
        changed_since(revision, fork)
    assert refused.value.exit_code == 2
    assert not (fork / "x").exists()


def test_outside_of_a_repository(tmp_path: Path) -> None:
    with pytest.raises(UnknownRevision, match="no usable git repository"):
        changed_since("HEAD", tmp_path)
