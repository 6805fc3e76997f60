"""`mlx-audit report`."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from junitparser import JUnitXml
from typer.testing import CliRunner

from mlx_audit import resources
from mlx_audit.cli import application
from mlx_audit.cli.report import BEGINNINGS
from mlx_audit.evidence.records import load_record, write_record
from mlx_audit.evidence.results import Results
from report_documents import audited, document, failed, result

BAD = result(failed())
GOOD = result(*audited(), target="good", family="good")
COMMITTED = resources.model_audits()
FORMATS = ("markdown", "junit", "sarif")


def report(*arguments: str | Path) -> Any:
    return CliRunner().invoke(application(), ["report", *map(str, arguments)])


def written(folder: Path, name: str, *documents: Results) -> list[Path]:
    """Write documents as `run --json` does."""
    files = [folder / f"{name}{number}.json" for number in range(len(documents))]
    for file, one in zip(files, documents, strict=True):
        file.write_text(one.to_json(), encoding="utf-8")
    return files


@pytest.fixture
def results(tmp_path: Path) -> Path:
    """A file with a claim that holds and one that fails."""
    return written(tmp_path, "results", document(GOOD, BAD))[0]


def add_family(audits: Path, family: str) -> None:
    """Copy a family's manifest and configurations."""
    shutil.copy(COMMITTED / f"{family}.yaml", audits)
    stated = (audits / f"{family}.yaml").read_text(encoding="utf-8")
    for file in (COMMITTED / "configurations").glob("*.json"):
        if file.stem in stated:
            shutil.copy(file, audits / "configurations")


@pytest.fixture
def audits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of audits with one family, and its records of two backends."""
    folder = tmp_path / "audits"
    (folder / "configurations").mkdir(parents=True)
    add_family(folder, "lfm2")
    shutil.copytree(COMMITTED / "records" / "lfm2", folder / "records" / "lfm2")
    monkeypatch.setattr(resources, "model_audits", lambda: folder)
    monkeypatch.chdir(tmp_path)
    return folder


def test_the_default_is_a_summary_on_stdout_and_no_gate(results: Path) -> None:
    done = report(results)
    assert done.exit_code == 0
    assert done.stdout.startswith("# mlx-audit: 1 of 2 claims fails, 1 holds\n")
    assert done.stderr == ""


def test_each_format_is_written(results: Path, tmp_path: Path) -> None:
    files = {name: tmp_path / f"out.{name}" for name in FORMATS}
    for _ in range(2):  # a report of ours is written over
        done = report(results, *(word for name, file in files.items() for word in (f"--{name}", file)))
        assert (done.exit_code, done.stdout, done.stderr) == (0, "", "")
    for name, file in files.items():
        assert file.read_bytes().startswith(BEGINNINGS[name])
        assert file.read_bytes().endswith(b"\n")
    assert JUnitXml.fromfile(str(files["junit"])).failures == 2
    assert json.loads(files["sarif"].read_text())["runs"][0]["results"][0]["ruleId"] == "SRC001"


def test_one_of_them_may_go_to_stdout(results: Path, tmp_path: Path) -> None:
    done = report(results, "--junit", "-", "--sarif", tmp_path / "out.sarif")
    assert done.exit_code == 0
    assert done.stdout.startswith("<?xml")
    assert (tmp_path / "out.sarif").is_file()


def test_several_results_are_one_report(tmp_path: Path) -> None:
    files = written(tmp_path, "r", document(GOOD), document(BAD), document(GOOD, backend="cuda"))
    done = report(*files)
    assert done.stdout.startswith("# mlx-audit: 1 of 3 claims fails, 2 hold\n")
    assert "- `cpu`: 2 results" in done.stdout
    assert "- `cuda`: 1 result" in done.stdout


def test_families_can_be_selected(results: Path) -> None:
    assert report(results, "--family", "good").stdout.startswith("# mlx-audit: the claim holds\n")
    done = report(results, "--family", "goood")
    assert (done.exit_code, done.stdout) == (2, "")
    assert "did you mean 'good'" in done.stderr


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        ("{", "cannot be read"),
        ("[]", "another format"),
        ('{"schema": "mlx-audit/results/1"}', "does not have the form"),
        ("\x00", "cannot be read"),
        ("[" * 100_000, "cannot be read"),
    ],
)
def test_bad_results_are_refused_before_anything_is_written(
    damage: str, said: str, results: Path, tmp_path: Path
) -> None:
    bad = tmp_path / "bad.json"
    bad.write_text(damage, encoding="utf-8")
    done = report(results, bad, "--markdown", tmp_path / "out.md")
    assert done.exit_code == 2
    assert "bad.json" in done.stderr
    assert said in done.stderr
    assert not (tmp_path / "out.md").exists()


def test_results_that_say_more_than_their_checks_are_refused(results: Path) -> None:
    data = json.loads(results.read_text(encoding="utf-8"))
    data["results"][1]["verdict"] = "capable"
    results.write_text(json.dumps(data), encoding="utf-8")
    done = report(results)
    assert (done.exit_code, done.stdout) == (2, "")
    assert "results.1.verdict: the verdict does not follow from the checks" in done.stderr


def test_what_is_read_is_never_written_over(results: Path, tmp_path: Path) -> None:
    before = results.read_bytes()
    link = tmp_path / "link"
    link.symlink_to(results)
    for place in (results, link):
        done = report(results, "--sarif", place)
        assert done.exit_code == 2
        assert "write over what is reported" in done.stderr
    assert results.read_bytes() == before


@pytest.mark.parametrize("name", FORMATS)
def test_somebody_elses_file_is_not_written_over(name: str, results: Path, tmp_path: Path) -> None:
    other = tmp_path / "README.md"
    other.write_text("# Mine\n", encoding="utf-8")
    done = report(results, f"--{name}", other)
    assert done.exit_code == 2
    assert "was not made by mlx-audit" in done.stderr
    assert other.read_text(encoding="utf-8") == "# Mine\n"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--junit", "-", "--sarif", "-"), "stdout takes one report; found: --junit - --sarif -"),
        (("--junit", "out", "--sarif", "out"), "two reports in one file"),
        (("--junit", "."), "no file name"),
        (("--junit", "no/such/folder"), "no such folder"),
        (("--markdown", "out.md", "--sarif", "no/such/folder"), "no such folder"),
    ],
)
def test_outputs_that_cannot_be(
    arguments: tuple[str, ...], said: str, results: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = report(results, *arguments)
    assert done.exit_code == 2
    assert said in done.stderr
    assert sorted(file.name for file in tmp_path.iterdir()) == ["results0.json"]


def test_a_file_that_is_named_twice_would_count_twice(results: Path) -> None:
    done = report(results, results.parent / "." / results.name)
    assert done.exit_code == 2
    assert "the same results twice" in done.stderr


def test_nothing_collected_is_said_and_written(tmp_path: Path) -> None:
    (file,) = written(tmp_path, "empty", document())
    files = {name: tmp_path / f"out.{name}" for name in FORMATS}
    done = report(file, *(word for name, place in files.items() for word in (f"--{name}", place)))
    assert (done.exit_code, done.stderr) == (3, "nothing was collected\n")
    assert files["markdown"].read_text(encoding="utf-8").startswith("# mlx-audit: nothing was collected\n")
    assert JUnitXml.fromfile(str(files["junit"])).tests == 0


def test_records_of_every_backend_are_the_default(audits: Path) -> None:
    done = report()
    assert done.exit_code == 0, done.stderr
    assert done.stdout.startswith("# mlx-audit: all 2 claims hold\n")
    assert "| holds | `lfm2` | `hybrid` | `cpu` |" in done.stdout
    assert "| holds | `lfm2` | `hybrid` | `cuda` |" in done.stdout


def test_a_variant_without_a_record_is_undecided(audits: Path) -> None:
    add_family(audits, "jamba")
    done = report()
    assert done.stdout.startswith("# mlx-audit: 2 of 4 claims cannot be decided, 2 hold\n")
    assert "no record of this variant on cuda" in done.stdout
    assert "mlx-audit run jamba --record" in done.stdout


def test_a_variant_that_a_record_lacks_is_undecided(audits: Path) -> None:
    add_family(audits, "llama")
    record = load_record(COMMITTED / "records" / "llama" / "cpu.json")
    del record.variants["sliding"]
    write_record(record, audits / "records")
    done = report("--family", "llama")
    rows = [line for line in done.stdout.splitlines() if "| `llama` | `sliding` | `cpu` |" in line]
    assert [row.split(" | ")[0] for row in rows] == ["| **undecided**"] * 2, "both claims"
    assert "no record of this variant on cpu" in done.stdout


def test_a_stale_record_proves_nothing(audits: Path) -> None:
    manifest = audits / "lfm2.yaml"
    stated = manifest.read_text(encoding="utf-8")
    assert "exactness: exact" in stated
    manifest.write_text(stated.replace("exactness: exact", "exactness: reordered"), encoding="utf-8")
    done = report()
    assert done.exit_code == 0
    assert done.stdout.startswith("# mlx-audit: 2 of 2 claims cannot be decided\n")
    assert "stale: what" in done.stdout
    assert "● capable" not in done.stdout


def test_a_damaged_record_is_named(audits: Path, tmp_path: Path) -> None:
    file = audits / "records" / "lfm2" / "cpu.json"
    text = file.read_text(encoding="utf-8")
    assert "pass" in text
    file.write_text(text.replace("pass", "fail", 1), encoding="utf-8")
    done = report("--markdown", tmp_path / "out.md")
    assert done.exit_code == 2
    assert "cpu.json" in done.stderr
    assert not (tmp_path / "out.md").exists()


def test_a_record_is_never_written_over(audits: Path) -> None:
    file = audits / "records" / "lfm2" / "cpu.json"
    before = file.read_bytes()
    done = report("--sarif", file)
    assert done.exit_code == 2
    assert "write over what is reported" in done.stderr
    assert file.read_bytes() == before
