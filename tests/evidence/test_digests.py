"""Digests: code counts, wherever it is imported from; comments, docstrings and layout don't."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from mlx_audit.evidence import digests

MODEL = '''"""A model."""

import mlx.core as mx

from .base import mask
from . import rope_utils
from mlx_lm.models.cache import KVCache
import mlx_lm.models.switch_layers as switch


class Model:
    """Docstring."""

    def __call__(self, x):
        # comment
        return mask(x) + 1
'''


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder that stands for mlx_lm/models."""
    for name, text in {
        "model": MODEL,
        "base": "from .deep import helper\n\ndef mask(x):\n    return x\n",
        "deep": "def helper():\n    return 1\n",
        "rope_utils": "SCALE = 1.0\n",
        "cache": "from .base import mask\nclass KVCache:\n    pass\n",
        "switch_layers": "LIMIT = 64\n",
        "unrelated": "VALUE = 1\n",
    }.items():
        (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.setattr(digests, "mlx_lm_models", lambda: tmp_path)
    return tmp_path


_ticks = iter(range(1, 10**6))


def rewrite(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    os.utime(path, ns=(0, next(_ticks) * 10**9))  # as if some time had passed


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("        # comment\n", ""),
        ("# comment", "# another remark, with a longer text"),
        ('    """Docstring."""\n', '    """Another docstring."""\n'),
        ('    """Docstring."""\n\n', ""),
        ('"""A model."""\n', ""),
        ("return mask(x) + 1", "return (\n            mask( x )\n            + 1\n        )"),
        ("\n\n\nclass", "\nclass"),
        ("mask(x)", "(mask(x))"),
    ],
    ids=[
        "comment gone",
        "comment changed",
        "docstring",
        "docstring gone",
        "module docstring",
        "layout",
        "lines",
        "parens",
    ],
)
def test_what_does_not_count(models: Path, old: str, new: str) -> None:
    before = digests.model_digest("mlx_lm.models.model")
    rewrite(models / "model.py", old, new)
    assert digests.model_digest("mlx_lm.models.model") == before


@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        ("model", "+ 1", "+ 2"),
        ("model", "+ 1", "+ 1.0"),
        ("model", "+ 1", "- 1"),
        ("model", "+ 1", "+ True"),
        ("model", "mask(x) + 1", "1 + mask(x)"),
        ("model", "def __call__(self, x)", "def __call__(self, x=None)"),
        ("model", "        return mask(x) + 1", "        return"),
        ("model", "class Model", "class Other"),
        ("base", "return x", "return x, None"),
        ("deep", "return 1", "return 2"),
        ("rope_utils", "1.0", "2.0"),
        ("cache", "pass", "step = 256"),
        ("switch_layers", "64", "65"),
    ],
)
def test_what_counts(models: Path, file: str, old: str, new: str) -> None:
    before = digests.model_digest("mlx_lm.models.model")
    assert before.startswith("sha256:")
    rewrite(models / f"{file}.py", old, new)
    after = digests.model_digest("mlx_lm.models.model")
    assert after != before
    rewrite(models / f"{file}.py", new, old)
    assert digests.model_digest("mlx_lm.models.model") == before


def test_modules_that_are_not_imported_do_not_count(models: Path) -> None:
    before = digests.model_digest("mlx_lm.models.model")
    rewrite(models / "unrelated.py", "1", "2")
    assert digests.model_digest("mlx_lm.models.model") == before
    (models / "model.py").write_text(MODEL + "\n\ndef late():\n    from . import unrelated\n")
    os.utime(models / "model.py", ns=(0, next(_ticks) * 10**9))
    changed = digests.model_digest("mlx_lm.models.model")
    rewrite(models / "unrelated.py", "2", "3")
    assert len({before, changed, digests.model_digest("mlx_lm.models.model")}) == 3


def test_a_file_elsewhere_counts_with_what_it_imports(
    models: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("elsewhere") / "model.py"
    path.write_text(MODEL)
    before = digests.file_digest(path)
    assert before == digests.model_digest("mlx_lm.models.model")
    rewrite(models / "deep.py", "return 1", "return 2")
    assert digests.file_digest(path) != before


def test_imports_that_go_round_in_a_circle_end(models: Path) -> None:
    (models / "deep.py").write_text("from .model import Model\nfrom .base import mask\n")
    assert digests.model_digest("mlx_lm.models.model").startswith("sha256:")


def test_nothing_is_imported_or_executed(models: Path) -> None:
    (models / "deep.py").write_text("raise SystemExit('executed')\n")
    before = set(sys.modules)
    digests.model_digest("mlx_lm.models.model")
    assert set(sys.modules) == before


def test_real_families_share_code_but_not_a_digest() -> None:
    llama, qwen2 = (digests.model_digest(f"mlx_lm.models.{family}") for family in ("llama", "qwen2"))
    assert llama != qwen2
    names = [path.stem for path in digests._closure(digests._module_path("mlx_lm.models.llama"))]
    assert names[0] == "llama"
    assert {"base", "cache", "rope_utils", "activations"} <= set(names)
    assert "qwen2" not in names


@pytest.mark.parametrize("part", ["caches", "adapters", "adapters/special", "decode"])
def test_our_own_code_counts(part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in ("caches", "adapters", "adapters/special", "decode", "reports"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "a.py").write_text("x = 1\n")
    monkeypatch.setattr(digests.mlx_audit, "__file__", str(tmp_path / "__init__.py"))
    uncached = digests.toolkit_digest.__wrapped__
    before = uncached()
    rewrite(tmp_path / "reports" / "a.py", "1", "2")
    rewrite(tmp_path / part / "a.py", "x = 1\n", "x = 1  # remark\n")
    assert uncached() == before
    rewrite(tmp_path / part / "a.py", "1", "2")
    changed = uncached()
    (tmp_path / part / "b.py").write_text("")
    assert len({before, changed, uncached()}) == 3
