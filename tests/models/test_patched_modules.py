"""Patched sources are loaded in the place of the installed ones, by a process that was started for that."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from mlx_audit.manifests.modules import models_folder
from model_files import llama_source, write_model

SCRIPT = """
import sys
from pathlib import Path
from mlx_audit.models.modules import import_patched

target = sys.argv[1] if sys.argv[1].startswith("mlx_lm.") else Path(sys.argv[1])
overlay = dict(zip(sys.argv[2::2], map(Path, sys.argv[3::2]), strict=True))
original, patched = import_patched(target, overlay)
import mlx_lm.models.cache
from mlx_audit.caches import FixedCapacityKVCache
assert FixedCapacityKVCache.native is mlx_lm.models.cache.KVCache
for module in (original, patched):
    print(hasattr(module, "PATCHED"), hasattr(sys.modules[module.initialize_rope.__module__], "PATCHED"),
          module.initialize_rope.__globals__.get("PATCHED"), module.__file__)
"""


def loaded(*arguments: str | Path) -> list[list[str]]:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, *map(str, arguments)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return [line.split() for line in done.stdout.splitlines()]


def installed(name: str) -> Path:
    folder = models_folder()
    assert folder is not None
    return folder / f"{name}.py"


def test_a_patched_model_stands_beside_the_installed_one(tmp_path: Path) -> None:
    patched = tmp_path / "llama.py"
    patched.write_text(llama_source() + "\nPATCHED = 1\n", encoding="utf-8")
    before, after = loaded("mlx_lm.models.llama", "mlx_lm.models.llama", patched)
    assert (before[0], before[3]) == ("False", str(installed("llama")))
    assert (after[0], after[3]) == ("True", str(patched))


def test_a_patched_helper_reaches_the_model_and_not_the_installed_one(tmp_path: Path) -> None:
    helper = tmp_path / "rope_utils.py"
    helper.write_text(installed("rope_utils").read_text() + "\nPATCHED = 1\n", encoding="utf-8")
    before, after = loaded("mlx_lm.models.llama", "mlx_lm.models.rope_utils", helper)
    assert (before[2], after[2]) == ("None", "1")
    assert after[3] == str(installed("llama")), "the model itself is as installed"


def test_a_users_own_file_is_patched_by_its_path(tmp_path: Path) -> None:
    own = write_model(tmp_path, "mine")
    patched = tmp_path / "patched" / "mine.py"
    patched.parent.mkdir()
    patched.write_text(own.read_text() + "\nPATCHED = 1\n", encoding="utf-8")
    before, after = loaded(own, own, patched)
    assert [before[0], before[3]] == ["False", str(own)]
    assert [after[0], after[3]] == ["True", str(patched)]
