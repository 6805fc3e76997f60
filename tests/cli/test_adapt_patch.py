"""`mlx-audit adapt --as patch`: offered only when proved, applied with standard tools, nothing installed is touched."""

from __future__ import annotations

import hashlib
import os
import subprocess
from pathlib import Path

import pytest
from typer.testing import CliRunner

from command import mlx_audit
from mlx_audit.cli import _files, application
from mlx_audit.errors import MlxAuditError
from mlx_audit.manifests.modules import models_folder
from mlx_audit.models.target import resolve_target
from model_files import FORWARD, write_config, write_model
from patched_families import CONFIGURATIONS, write_configuration
from unseen import KINDS, POSITIONS, write_unseen

DEAD_END = (
    FORWARD,
    f"""\
        inputs = inputs[:, : 1 + int(cache[0].offset)] if cache else inputs
        inputs = inputs if cache[0].offset > 3 else inputs + 0
{FORWARD}""",
)


def installed() -> str:
    folder = models_folder()
    assert folder is not None
    total = hashlib.sha256()
    for path in sorted(folder.glob("*.py")):
        total.update(path.read_bytes())
    return total.hexdigest()


@pytest.mark.nightly
@pytest.mark.parametrize("kind", KINDS)
def test_an_unseen_file_becomes_capable(tmp_path: Path, kind: str) -> None:
    before = installed()
    model, config = write_unseen(tmp_path, kind)
    line = next(n for n, text in enumerate(model.read_text().splitlines(), 1) if POSITIONS in text)
    assert f"unseen.py:{line}:" in mlx_audit("inspect", model).stdout
    refuted = mlx_audit("run", model, "--config", config)
    assert refuted.returncode == 1
    assert f"unseen.py:{line}" in refuted.stdout
    assert "SRC001 failed" in refuted.stdout
    manifest, patch = tmp_path / "unseen.yaml", tmp_path / "unseen.patch"
    assert mlx_audit("draft", model, "--config", config, "-o", manifest).returncode == 0
    offered = mlx_audit("adapt", manifest, "--as", "patch", "-o", patch)
    assert offered.returncode == 0, offered.stderr
    assert "bit-equal to the unpatched" in offered.stderr
    subprocess.run(["git", "apply", patch.name], cwd=tmp_path, check=True)
    for target in ((manifest,), (model, "--config", config)):
        proved = mlx_audit("run", *target)
        assert proved.returncode == 0, proved.stdout
        assert "● capable" in proved.stdout
    assert installed() == before


@pytest.mark.nightly
@pytest.mark.parametrize("family", sorted(CONFIGURATIONS))
def test_a_family_becomes_capable(tmp_path: Path, family: str) -> None:
    before = installed()
    done = mlx_audit("adapt", family, "--as", "patch", "--config", write_configuration(tmp_path, family))
    unpatched, _, patched = done.stderr.partition("patched by ")
    assert done.returncode == 0, done.stderr
    assert "✕ not-capable" in unpatched
    assert f"mlx_lm/models/{family}.py:" in unpatched
    assert "● capable" in patched or "◐ limited" in patched
    assert done.stdout.startswith(f"--- a/mlx_lm/models/{family}.py\n")
    assert installed() == before


def test_all_that_no_codemod_mends_is_named_once_and_nothing_is_offered(tmp_path: Path) -> None:
    model, patch = write_model(tmp_path, "dead_end", DEAD_END), tmp_path / "out.patch"
    done = mlx_audit("adapt", model, "--as", "patch", "--config", write_config(tmp_path), "-o", patch)
    assert (done.returncode, done.stdout) == (1, "")
    before, _, after = done.stderr.partition("patched by ")
    named = [line for line in after.splitlines() if line.startswith("no codemod mends dead_end.py:")]
    assert len(named) == len(set(named)) >= 2
    assert any("int(cache[0].offset)" in line for line in named)
    assert any("cache[0].offset > 3" in line for line in named)
    assert all(" SRC001 " in line for line in named)
    assert "not offered" in after
    assert after.splitlines()[-1] == "mend them in the model's source; how: mlx-audit explain SRC001"
    assert not patch.exists()
    first, result = before.splitlines()
    assert first == "as it is:"
    assert result.startswith("✕ not-capable dead_end")
    assert "SRC001 at dead_end.py:" in result


def test_a_file_that_is_no_patch_is_kept(tmp_path: Path) -> None:
    model, config = write_unseen(tmp_path)
    note, results = tmp_path / "notes.md", tmp_path / "notes.txt"
    note.write_text("# mine\n")
    results.write_text("mine\n")
    source, real = model.read_text(), config.read_text()
    link = tmp_path / "link.patch"
    link.symlink_to(model)
    patch = ("adapt", model, "--as", "patch", "--config", config)
    run = ("run", model, "--config", config)
    for arguments, says in (
        ((*patch, "-o", note), "was not made by mlx-audit; allowed"),
        ((*patch, "--json", results, "-o", tmp_path / "new.patch"), "was not made by mlx-audit"),
        ((*run, "--json", results), "was not made by mlx-audit"),
        ((*patch, "-o", model, "--force"), "write over what is audited"),
        ((*patch, "-o", link, "--force"), "write over what is audited"),
        ((*patch, "-o", config, "--force"), "write over what is audited"),
        ((*patch, "--json", config), "write over what is audited"),
        ((*run, "--json", config), "write over what is audited"),
        ((*run, "--repro", model), "write over what is audited"),
    ):
        done = CliRunner().invoke(application(), list(map(str, arguments)))
        assert (done.exit_code, done.stdout) == (2, ""), done.stderr
        assert says in done.stderr
        assert "as it is" not in done.stderr, "before any work"
    assert (note.read_text(), results.read_text()) == ("# mine\n", "mine\n")
    assert (model.read_text(), config.read_text()) == (source, real)
    assert not (tmp_path / "new.patch").exists()


def test_what_is_no_file_or_ours_may_be_written(tmp_path: Path) -> None:
    pipe, ours, empty, hand = (tmp_path / name for name in ("pipe", "old.patch", "empty", "hand.md"))
    os.mkfifo(pipe)
    ours.write_text("--- a/unseen.py\n+++ b/unseen.py\n")
    empty.touch()
    hand.write_text("# mine\n")
    for place in (pipe, ours, empty, Path("/dev/null"), Path("/dev/stdout"), tmp_path / "new"):
        assert _files.patch("-o", place, [hand], force=False) == place
    assert _files.patch("-o", hand, [ours], force=True) == hand
    for place in (pipe, empty, Path("/dev/null"), tmp_path / "new"):
        assert _files.results("--json", str(place), [hand]) == place
    with pytest.raises(MlxAuditError, match="write over what is audited"):
        _files.results("--json", str(hand), [hand])


def test_the_files_of_a_checkpoint_and_of_a_manifest_are_inputs(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        (folder / name).write_text('{"model_type": "qwen2"}')
    read = _files.inputs(resolve_target(str(folder)))
    assert {folder / "config.json", folder / "tokenizer.json"} <= set(read)
    assert {"qwen2.yaml", "Qwen--Qwen2.5-0.5B-Instruct.json"} <= {path.name for path in read}


def test_check_compares_without_an_audit(tmp_path: Path) -> None:
    model, config = write_unseen(tmp_path)
    patch = tmp_path / "unseen.patch"

    def check() -> tuple[int, str]:
        done = mlx_audit("adapt", model, "--as", "patch", "--config", config, "--check", patch)
        assert done.stdout == ""
        return done.returncode, done.stderr

    code, text = check()
    assert (code, "cannot be read" in text) == (2, True), "there is none"
    patch.write_text("stale\n")
    code, text = check()
    assert (code, "out of date" in text) == (1, True)
    lines = [line[1:] for line in text.splitlines() if line.startswith("+") and line != "+++ now"]
    patch.write_text("\n".join(lines) + "\n")
    code, text = check()
    assert (code, "is up to date" in text) == (0, True), text
    subprocess.run(["git", "apply", patch.name], cwd=tmp_path, check=True)
    assert POSITIONS not in model.read_text()
    code, text = check()
    assert (code, "is applied already" in text) == (1, True)


def test_the_patch_and_the_results_do_not_mix_on_stdout(tmp_path: Path) -> None:
    model, config = write_unseen(tmp_path)
    done = mlx_audit("adapt", model, "--as", "patch", "--config", config, "--json", "-")
    assert (done.returncode, done.stdout) == (2, "")
    assert "-o FILE" in done.stderr
