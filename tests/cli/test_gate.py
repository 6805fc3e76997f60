"""`mlx-audit gate`: what it prints, its exit codes, and forged records that only `--strict` sees."""

from __future__ import annotations

import json
import subprocess
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from command import mlx_audit
from gated import HOST_READ, copy_of_mlx_lm, edit, own_family
from mlx_audit.cli import application
from mlx_audit.evidence.environment import backend
from mlx_audit.evidence.records import record_path


def gate(*arguments: str | Path) -> Result:
    return CliRunner().invoke(application(), ["gate", *map(str, arguments)])


def claims(result: Result) -> dict[tuple[str, str], dict[str, object]]:
    rows = json.loads(result.stdout)["claims"]
    return {(row["family"], row["claim"]): row for row in rows}


def test_all_committed_records_hold_within_five_seconds() -> None:
    started = time.process_time()
    result = gate("--backend", "cpu")
    assert result.exit_code == 0, result.output
    assert "● holds" in result.stdout
    assert result.stdout.splitlines()[-1].endswith("; all claims hold")
    rows = json.loads(gate("--backend", "cuda", "--json").stdout)["claims"]
    assert time.process_time() - started < 5
    # No audit of restored prefixes was recorded on a GPU yet; that leaves compiled decoding as it is.
    restore = [row for row in rows if row["claim"] == "prefix_restore"]
    assert {row["reason"] for row in restore} <= {"the record has no check of restored prefixes"}
    assert {row["state"] for row in rows if row not in restore} <= {"holds", "undecided"}


def test_an_edited_helper_of_an_installed_mlx_lm(tmp_path: Path) -> None:
    """In a copy that Python finds first: exit 1 with the file and its families, and 0 when it is put back."""
    models = copy_of_mlx_lm(tmp_path)
    edit(models / "mamba2.py", "class ModelArgs", "# a remark\nclass ModelArgs")
    edit(models / "rope_utils.py", "base: float = 10000", "base: float = 10001")
    done = mlx_audit("gate", "--backend", "cpu", env={"PYTHONPATH": str(tmp_path)})
    assert done.returncode == 1, done.stderr
    lines = done.stdout.splitlines()
    (told,) = [line for line in lines if line.startswith("mlx_lm/models/rope_utils.py changed: it concerns ")]
    families = told.rpartition("concerns ")[2].split(", ")
    assert {"llama", "qwen2", "qwen3_next"} <= set(families)
    assert not {"mamba2", "recurrent_gemma"} & set(families)
    failed = [line for line in lines if line.startswith("✕ stale")]
    assert all("fix: mlx-audit run" in line and "--profile ci --record" in line for line in failed)
    assert any(line.startswith("● holds  ") and "mamba2 recurrent" in line for line in lines)
    assert lines[-1].endswith("; a claim failed")
    edit(models / "rope_utils.py", "base: float = 10001", "base: float = 10000")
    done = mlx_audit("gate", "--backend", "cpu", env={"PYTHONPATH": str(tmp_path)})
    assert done.returncode == 0, done.stdout


def test_the_json_document(tmp_path: Path) -> None:
    manifest = own_family(tmp_path)
    result = gate(manifest, "qwen2", "--json")
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert (document["schema"], document["exit_code"], document["strict"]) == ("mlx-audit/gate/1", 0, False)
    keys = {"family", "variant", "claim", "claimed", "backend", "state", "reason", "fix", "files"}
    assert all(row.keys() == keys for row in document["claims"])
    assert claims(result)["qwen2", "rope.dynamic"]["state"] == "undecided"
    edit(tmp_path / "mine.py", "        return out\n", "        return out + 0\n")
    result = gate(manifest, "--json")
    assert result.exit_code == 1
    row = claims(result)["mine", "compiled_decode"]
    assert (row["state"], row["files"]) == ("stale", ["./mine.py"])
    assert row["fix"] == f"mlx-audit run {manifest} --record"
    assert json.loads(result.stdout)["files"] == {"./mine.py": ["mine"]}


def test_exit_codes(tmp_path: Path) -> None:
    broken = tmp_path / "broken.yaml"
    broken.write_text("family: [\n")
    empty = tmp_path / "records"
    empty.mkdir()
    for arguments, code, text in (
        (["qwen2", "--records", empty], 1, "✕ missing"),
        (["qwen2", "--records", empty], 1, f"fix: MLX_AUDIT_RECORDS={empty} mlx-audit run qwen2 --record"),
        (["no_such_family"], 2, "no such target"),
        ([broken], 2, "broken.yaml:2:1"),
        ([""], 2, "the target is empty"),
        (["qwen2", "--backend", "tpu"], 2, "unknown value of --backend"),
        (["qwen2", "--records", tmp_path / "none"], 2, "no such folder of records"),
        (["qwen2", "--backend", "metal", "--strict"], 2, "only the audits of this machine's backend"),
        (["qwen2", "--changed-since", "no-such-branch"], 2, "no such revision"),
        (["qwen2", "--changed-since", "--help"], 2, "no revision"),
    ):
        result = gate(*arguments)
        assert (result.exit_code, text in result.output) == (code, True), (arguments, result.output)


def test_nothing_is_collected_from_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlx_audit.resources.model_audits", lambda: tmp_path)
    result = gate()
    assert result.exit_code == 3
    assert "nothing was collected" in result.output


def test_changed_since(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing touched is no failure, whatever the records say; a touched family is gated."""
    one, two = own_family(tmp_path, name="one"), own_family(tmp_path, name="two")
    options = ["-c", "user.name=n", "-c", "user.email=e@x", "-c", "commit.gpgsign=false"]
    monkeypatch.chdir(tmp_path)
    for arguments in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "start"]):
        subprocess.run(["git", *options, *arguments], check=True, capture_output=True)
    result = gate(one, two, "--changed-since", "HEAD")
    assert result.exit_code == 0
    assert "nothing of these families changed since HEAD: one, two" in result.stderr
    assert result.stdout.startswith("0 claims in ")
    assert result.stdout.endswith("; nothing to gate\n")
    edit(tmp_path / "two.py", "        return out\n", "        return out + 0\n")
    result = gate(one, two, "--changed-since", "HEAD", "--json")
    assert result.exit_code == 1
    assert {family for family, _ in claims(result)} == {"two"}
    assert json.loads(result.stdout)["untouched"] == ["one"]


def test_a_forged_record_is_caught_by_a_new_audit(tmp_path: Path) -> None:
    """A record and its self-digest say `capable` of a model that is not: the gate believes it, `--strict` does not."""
    manifest = own_family(tmp_path, HOST_READ)
    assert gate(manifest).exit_code == 0
    result = gate(manifest, "--strict", "--json")
    assert result.exit_code == 1, result.output
    row = claims(result)["mine", "compiled_decode"]
    assert row["state"] == "contradicted"
    assert "audited again: tiny is not-capable" in str(row["reason"])


@pytest.mark.nightly
def test_an_honest_record_holds_and_an_altered_figure_does_not(tmp_path: Path) -> None:
    manifest = own_family(tmp_path)
    done = mlx_audit("run", manifest, "--record")
    assert done.returncode == 0, done.stderr
    assert gate(manifest, "--strict").exit_code == 0
    path = record_path(tmp_path / "records", "mine", backend())
    data = json.loads(path.read_text(encoding="utf-8"))
    from mlx_audit.evidence.records import self_digest

    for check in data["variants"]["full"]["results"][0]["checks"]:
        if check["code"] == "SRC001":
            check["figures"]["consumers"] += 1
    data["digest"] = self_digest(data)
    path.write_text(json.dumps(data), encoding="utf-8")
    assert gate(manifest).exit_code == 0
    result = gate(manifest, "--strict")
    assert result.exit_code == 1
    assert "SRC001 consumers is" in result.stdout
