"""`mlx-audit adapt --as patch`: offered only when proved, applied with standard tools, nothing installed is touched."""

from __future__ import annotations

import hashlib
import subprocess
from pathlib import Path

import pytest

from command import mlx_audit
from mlx_audit.manifests.modules import models_folder
from model_files import FORWARD, write_config, write_model
from patched_families import CONFIGURATIONS, write_configuration
from unseen import KINDS, POSITIONS, write_unseen

DEAD_END = (
    FORWARD,
    f"        inputs = inputs[:, : 1 + int(cache[0].offset)] if cache else inputs\n{FORWARD}",
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


def test_what_no_codemod_mends_is_named_and_nothing_is_offered(tmp_path: Path) -> None:
    model = write_model(tmp_path, "dead_end", DEAD_END)
    patch = tmp_path / "out.patch"
    done = mlx_audit("adapt", model, "--as", "patch", "--config", write_config(tmp_path), "-o", patch)
    assert (done.returncode, done.stdout) == (1, "")
    assert "no codemod mends dead_end.py:" in done.stderr
    assert "int(cache[0].offset)" in done.stderr
    assert "not offered" in done.stderr
    assert not patch.exists()


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
