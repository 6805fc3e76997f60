"""`mlx-audit adapt --as module`: what it prints, writes and checks, and what it refuses."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from mlx_audit import resources
from mlx_audit.adapters.generation import render_adapter
from mlx_audit.cli import application
from mlx_audit.manifests import find_manifest

GOLDENS = Path(__file__).parents[1] / "adapters" / "goldens"


def adapt(*arguments: str | Path) -> Result:
    return CliRunner().invoke(application(), ["adapt", *map(str, arguments)])


def made_from(family: str) -> str:
    manifest = find_manifest(family)
    assert manifest is not None
    return render_adapter(manifest)


def test_it_prints_the_module() -> None:
    for arguments in (("llama",), ("llama", "--as", "module"), (resources.model_audits() / "llama.yaml",)):
        result = adapt(*arguments)
        assert result.exit_code == 0, result.stderr
        assert result.stdout == made_from("llama")


def test_it_writes_and_writes_again_the_same_bytes(tmp_path: Path) -> None:
    file = tmp_path / "adapter.py"
    assert adapt("gpt_oss", "-o", file).exit_code == 0
    first = file.read_bytes()
    assert first == (GOLDENS / "gpt_oss.py").read_bytes()
    assert adapt("gpt_oss", "-o", file).exit_code == 0
    assert adapt("gpt_oss", "--check", file).exit_code == 0
    assert file.read_bytes() == first
    assert adapt("qwen2", "-o", file).exit_code == 0, "what we made we may replace"
    assert file.read_text() == made_from("qwen2")
    assert list(tmp_path.iterdir()) == [file]
    assert file.stat().st_mode & 0o777 == 0o644


def test_a_file_of_somebody_else_is_kept(tmp_path: Path) -> None:
    file = tmp_path / "adapter.py"
    file.write_text(f"import os\n{made_from('qwen2')}")
    result = adapt("qwen2", "-o", file)
    assert result.exit_code == 2
    assert "was not made by mlx-audit adapt; found: import os" in result.stderr
    assert "--force" in result.stderr
    assert file.read_text().startswith("import os\n")
    assert adapt("qwen2", "-o", file, "--force").exit_code == 0
    assert file.read_text() == made_from("qwen2")


def test_check_tells_current_stale_and_missing_apart(tmp_path: Path) -> None:
    file = tmp_path / "qwen3_5.py"
    missing = adapt("qwen3_5", "--check", file)
    assert missing.exit_code == 2
    assert f"missing; fix: mlx-audit adapt qwen3_5 --as module -o {file}" in missing.stderr
    shutil.copy(GOLDENS / "qwen3_5.py", file)
    assert (adapt("qwen3_5", "--check", file).exit_code, file.exists()) == (0, True)
    file.write_text(file.read_text().replace("slots=2", "slots=3"))
    stale = adapt("qwen3_5", "--check", file)
    assert stale.exit_code == 1
    assert "-                entries.append(entry(FixedCapacityArraysCache, slots=3))" in stale.stderr
    assert "+                entries.append(entry(FixedCapacityArraysCache, slots=2))" in stale.stderr
    assert "stale; fix: mlx-audit adapt qwen3_5" in stale.stderr
    assert stale.stdout == ""
    assert len(stale.stderr.splitlines()) < 12
    assert adapt("qwen2", "--check", file).exit_code == 1, "of another family"


def test_a_file_that_an_older_version_made_alike_is_current(tmp_path: Path) -> None:
    file = tmp_path / "qwen2.py"
    text = made_from("qwen2")
    file.write_text(text.replace("# Made by mlx-audit 0.", "# Made by mlx-audit 17.", 1))
    assert file.read_text() != text
    assert adapt("qwen2", "--check", file).exit_code == 0
    file.write_text(text.replace("sha256:", "sha256:0", 1))
    assert adapt("qwen2", "--check", file).exit_code == 1


def test_a_long_difference_is_cut(tmp_path: Path) -> None:
    file = tmp_path / "qwen2.py"
    file.write_text("\x1b[31mred\n" * 500)
    result = adapt("qwen2", "--check", file)
    assert result.exit_code == 1
    assert "more lines" in result.stderr
    assert "\x1b" not in result.stderr
    assert len(result.stderr.splitlines()) < 60


@pytest.mark.parametrize("target", ["phixtral", "model.py", "no/such/model.py"])
def test_without_a_manifest_there_is_nothing_to_generate(target: str) -> None:
    result = adapt(target)
    assert result.exit_code == 2
    assert "no manifest declares this target" in result.stderr
    assert f"fix: mlx-audit draft {target} --config config.json" in result.stderr
    assert result.stdout == ""


def test_the_manifest_beside_a_model_file_is_named(tmp_path: Path) -> None:
    model, manifest = tmp_path / "vole.py", tmp_path / "any.yaml"
    model.write_text("")
    manifest.write_text("family: [\nmodule: ./vole.py\n")
    result = adapt(model)
    assert result.exit_code == 2
    assert f"fix: name {manifest}" in result.stderr
    manifest.write_text("module: ./other.py\n")
    assert "fix: mlx-audit draft" in adapt(model).stderr


def test_the_manifest_is_not_written_over(tmp_path: Path) -> None:
    own = tmp_path / "mine.yaml"
    text = (resources.model_audits() / "qwen2.yaml").read_text().replace("family: qwen2", "family: mine")
    own.write_text(text[: text.index("configurations:")])
    before = own.read_text()
    result = adapt(own, "-o", own, "--force")
    assert result.exit_code == 2
    assert "write over what is audited" in result.stderr
    assert own.read_text() == before


def test_what_names_nothing_is_refused(tmp_path: Path) -> None:
    broken = tmp_path / "broken.yaml"
    broken.write_text("family: [\n")
    for arguments in (
        ("no_such_family",),
        ("",),
        (broken,),
        ("qwen2", "--as", "wheel"),
        ("qwen2", "--config", broken),
        ("qwen2", "--json", "-"),
        ("qwen2", "-o", tmp_path),
        ("qwen2", "-o", tmp_path / "absent" / "a.py"),
        ("qwen2", "-o", tmp_path / "a.py", "--check", tmp_path / "a.py"),
        ("qwen2", "--check", tmp_path),
    ):
        result = adapt(*arguments)
        assert result.exit_code == 2, arguments
        assert result.stderr
        assert result.stdout == ""
    assert list(tmp_path.iterdir()) == [broken]


def test_a_manifest_of_ones_own(tmp_path: Path) -> None:
    """The command in the file names the manifest as it lies beside it."""
    own = tmp_path / "mine.yaml"
    text = (resources.model_audits() / "qwen2.yaml").read_text().replace("family: qwen2", "family: mine")
    own.write_text(text[: text.index("configurations:")])
    result = adapt(own)
    assert result.exit_code == 0, result.stderr
    first = result.stdout.splitlines()[0]
    assert "from mine.yaml, sha256:" in first
    assert first.endswith("mlx-audit adapt mine.yaml --as module")
