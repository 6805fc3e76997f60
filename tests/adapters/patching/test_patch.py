"""Patching whole files."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import libcst as cst
import pytest

from mlx_audit.adapters.patching import Codemod, codemods, patch, patch_source
from mlx_audit.adapters.patching.patch import DEEPEST_SOURCE, LARGEST_SOURCE
from mlx_audit.errors import TargetError

SPEC = find_spec("mlx_lm")
assert SPEC is not None
assert SPEC.submodule_search_locations
MODELS = Path(SPEC.submodule_search_locations[0]) / "models"
MENDED = {
    "afm7": "position_of_reused_keys",
    "gpt_bigcode": "arange_from_position",
    "internlm3": "dynamic_rope",
    "olmo": "mask_applied",
    "phi3small": "mask_applied",
    "rope_utils": "dynamic_rope",
}


@pytest.mark.parametrize("name", [*MENDED, "llama"])
def test_a_second_patch_changes_nothing(tmp_path: Path, name: str) -> None:
    patched = patch_source(MODELS / f"{name}.py", f"mlx_lm.models.{name}")
    assert patched.before == (MODELS / f"{name}.py").read_text()
    assert MENDED.get(name) in (None, *patched.applied)
    (tmp_path / f"{name}.py").write_text(patched.after)
    again = patch_source(tmp_path / f"{name}.py")
    assert again.applied == ()
    assert again.after == again.before == patched.after


@pytest.mark.nightly
@pytest.mark.parametrize("file", sorted(MODELS.glob("*.py")), ids=lambda file: file.stem)
def test_any_file_of_mlx_lm_is_patched_once(tmp_path: Path, file: Path) -> None:
    patched = patch_source(file, f"mlx_lm.models.{file.stem}")
    compile(patched.after, str(file), "exec")
    (tmp_path / file.name).write_text(patched.after)
    assert patch_source(tmp_path / file.name).applied == ()


def test_codemods_are_found_by_their_names_each_of_which_is_its_own() -> None:
    names = [mod.name for mod in codemods()]
    assert names == sorted(set(names))
    assert set(MENDED.values()) <= set(names)
    assert all(type(mod).__doc__ for mod in codemods())


class Counts(Codemod):
    """Counts on in `x = 0`, up to a limit."""

    name, mends, module = "counts", (), "counted"

    def __init__(self, limit: int) -> None:
        self.limit = limit

    def apply(self, tree: cst.Module) -> cst.Module:
        number = int(tree.code.removeprefix("x = "))
        return cst.parse_module(f"x = {number + 1}\n") if number < self.limit else tree


def test_codemods_are_applied_until_nothing_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "counted.py").write_text("x = 0\n")
    (tmp_path / "another.py").write_text("x = 0\n")
    monkeypatch.setattr(patch, "codemods", lambda: (Counts(3),))
    assert patch_source(tmp_path / "counted.py").after == "x = 3\n"
    assert patch_source(tmp_path / "counted.py").applied == ("counts",)
    assert patch_source(tmp_path / "another.py").applied == ()
    monkeypatch.setattr(patch, "codemods", lambda: (Counts(100),))
    with pytest.raises(TargetError, match="does not come to rest"):
        patch_source(tmp_path / "counted.py")


@pytest.mark.parametrize(
    ("data", "where", "what"),
    [
        (b"def f(:\n", ":1:7", "not valid Python"),
        (b"x = 1\nif x:\ny = 2\n", ":3:1", "not valid Python"),
        (b"x = '\xff'\n", "", "not UTF-8"),
        (b"a\x00b", "", "not valid Python"),
        (b"x = 1\n" * (LARGEST_SOURCE // 6 + 1), "", "too large"),
        (b"x = " + b"-" * DEEPEST_SOURCE + b"1\n", "", "too deeply"),
        (b"x = " + b"(" * 5000 + b")" * 5000, ":1:", "not valid Python"),
        (b"x = 1" + b" + 1" * 20000, "", "not valid Python"),
    ],
)
def test_what_cannot_be_patched_is_refused_with_its_place(
    tmp_path: Path, data: bytes, where: str, what: str
) -> None:
    file = tmp_path / "strange.py"
    file.write_bytes(data)
    with pytest.raises(TargetError) as caught:
        patch_source(file)
    assert what in caught.value.what
    assert str(caught.value.where).startswith(f"{file}{where}")


def test_a_byte_order_mark_stays(tmp_path: Path) -> None:
    file = tmp_path / "marked.py"
    file.write_bytes(b"\xef\xbb\xbfclass Model:\n    y = 1\n")
    patched = patch_source(file)
    assert patched.before == "\ufeffclass Model:\n    y = 1\n"
    assert patched.applied == ("new_fixed_capacity_cache",)
    assert patched.after.startswith(patched.before)
    file.write_text(patched.after)
    assert patch_source(file).after == patched.after


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TargetError, match="cannot be read"):
        patch_source(tmp_path / "none.py")


def test_a_deep_expression_that_is_taken_is_patched(tmp_path: Path) -> None:
    file = tmp_path / "deep.py"
    file.write_text("x = " + "-" * (DEEPEST_SOURCE - 10) + "1\n\n\nclass Model:\n    y = 1\n")
    assert patch_source(file).applied == ("new_fixed_capacity_cache",)


def test_adapters_need_no_libcst() -> None:
    code = "import sys; sys.modules['libcst'] = None; import mlx_audit.adapters"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_nothing_of_a_source_is_executed(tmp_path: Path) -> None:
    file = tmp_path / "loud.py"
    file.write_text("raise SystemExit(3)\n")
    assert patch_source(file).after == file.read_text()
