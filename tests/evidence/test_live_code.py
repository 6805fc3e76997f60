"""A record speaks of source files; a live model may run something else."""

from __future__ import annotations

import functools
import os
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models import base, llama, mamba2

from mlx_audit.evidence.live_code import foreign_code, own_file
from mlx_audit.evidence.own_imports import foreign_imports
from mlx_audit.manifests import load_manifests
from mlx_audit.models.build import build_tiny, resolve_arguments
from mlx_audit.models.modules import import_file, import_model
from model_files import write_model
from tiny_models import FAMILIES, config_of, tiny_model
from zoo_models import CONFIGURATIONS, zoo_model


class Rope(nn.Module):
    def __call__(self, x: Any, offset: Any = 0) -> Any:
        return x


@pytest.mark.parametrize("family", FAMILIES)
def test_models_as_mlx_lm_makes_them_are_known(family: str) -> None:
    assert foreign_code(tiny_model(family)) == []


def test_quantized_weights_and_low_rank_adapters_are_known() -> None:
    from mlx_lm.tuner.utils import linear_to_lora_layers

    model = tiny_model()
    nn.quantize(model, group_size=32, bits=4)
    linear_to_lora_layers(model, 2, {"rank": 4, "scale": 2.0, "dropout": 0.0})
    assert foreign_code(model) == []


def test_dropout_in_training_is_named() -> None:
    from mlx_lm.tuner.utils import linear_to_lora_layers

    model = tiny_model()
    linear_to_lora_layers(model, 1, {"rank": 4, "scale": 2.0, "dropout": 0.5})
    model.train()
    assert "model.eval()" in foreign_code(model)[0]
    model.eval()
    assert foreign_code(model) == []


def test_a_module_of_another_package_is_named() -> None:
    model = tiny_model()
    model.model.layers[1].self_attn.rope = Rope()
    (found,) = foreign_code(model)
    assert "model.layers.1.self_attn.rope is a" in found
    assert "Rope" in found


def test_a_function_in_the_place_of_a_module_is_named() -> None:
    model = tiny_model()
    model.model.layers[1].self_attn.rope = lambda x, offset=0: x
    assert "model.layers.1.self_attn.rope is" in foreign_code(model)[0]


def test_a_patched_class_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    own = llama.Attention.__call__
    monkeypatch.setattr(llama.Attention, "__call__", lambda self, *a, **k: own(self, *a, **k))
    assert foreign_code(tiny_model()) == [
        "mlx_lm.models.llama.Attention.__call__ comes from test_live_code.py"
    ]


@pytest.mark.parametrize("family", CONFIGURATIONS)
def test_models_with_rings_and_recurrences_are_known(family: str) -> None:
    assert foreign_code(zoo_model(family)) == []


@pytest.mark.parametrize("manifest", load_manifests(), ids=lambda manifest: manifest.family)
def test_every_family_with_a_manifest_is_known(manifest: Any) -> None:
    module = import_model(manifest.module)
    for variant in manifest.variants.values():
        assert foreign_code(build_tiny(module, resolve_arguments(module, variant.tiny), seed=0)) == []


def recurrent() -> nn.Module:
    (tiny,) = (m.variants["recurrent"].tiny for m in load_manifests() if m.family == "mamba2")
    return build_tiny(mamba2, resolve_arguments(mamba2, tiny), seed=0)


def one(model: nn.Module, own: Path | None = None) -> str:
    """Return what is found once more, in a process that has seen the healthy model."""
    (found,) = foreign_code(model, own)
    return found


def test_any_patched_method_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    model = recurrent()
    assert foreign_code(model) == []
    own = mamba2.Mamba2Block._conv
    monkeypatch.setattr(mamba2.Mamba2Block, "_conv", lambda self, *a, **k: own(self, *a, **k))
    assert one(model) == "mlx_lm.models.mamba2.Mamba2Block._conv comes from test_live_code.py"


@pytest.mark.parametrize(
    "wrapped",
    [
        staticmethod(lambda self, x: x),
        property(lambda self: lambda x: x),
        functools.partialmethod(lambda self, x: x),
        mx.compile(lambda self, x: x),
        functools.lru_cache(lambda self, x: x),
        mock.MagicMock(),
    ],
    ids=lambda wrapped: type(wrapped).__name__,
)
def test_a_patch_in_a_wrapper_is_named(wrapped: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model()
    assert foreign_code(model) == []
    monkeypatch.setattr(llama.MLP, "__call__", wrapped)
    assert "mlx_lm.models.llama.MLP.__call__" in one(model)


def test_a_method_with_the_name_of_the_patched_one_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model()
    own = llama.MLP.__call__

    @functools.wraps(own)
    def call(self: Any, x: Any) -> Any:
        return 2 * own(self, x)

    monkeypatch.setattr(llama.MLP, "__call__", call)
    assert "MLP.__call__ comes from test_live_code.py" in one(model)


def test_code_put_into_a_function_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """As reloaders of notebooks do; the function stays the same object."""
    model = tiny_model()
    assert foreign_code(model) == []
    monkeypatch.setattr(llama.MLP.__call__, "__code__", (lambda self, x: x).__code__)
    assert "MLP.__call__ comes from test_live_code.py" in one(model)


@pytest.mark.parametrize("module", [llama, base])
def test_a_function_replaced_in_a_module_is_named(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model()
    assert foreign_code(model) == []
    monkeypatch.setattr(module, "scaled_dot_product_attention", lambda q, k, v, **_: q)
    assert f"{module.__name__}.scaled_dot_product_attention comes from test_live_code.py" in one(model)


def test_a_function_of_mlx_that_is_replaced_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model()
    assert foreign_code(model) == []
    monkeypatch.setattr(mx.fast, "scaled_dot_product_attention", lambda *a, **k: a[0])
    assert "scaled_dot_product_attention comes from test_live_code.py" in one(model)


def test_another_function_of_mlx_lm_in_its_place_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model()
    monkeypatch.setattr(llama, "scaled_dot_product_attention", base.quantized_scaled_dot_product_attention)
    assert "is quantized_scaled_dot_product_attention of base.py" in one(model)
    monkeypatch.undo()
    monkeypatch.setattr(llama.MLP, "__call__", llama.Attention.__call__)
    assert "MLP.__call__ is Attention.__call__ of llama.py" in one(model)


HEALTHY = '''

import enum
import functools
from collections import namedtuple
from dataclasses import field
from typing import NamedTuple

import numpy as np

WINDOW = 8
_calls = {}


class Kind(enum.Enum):
    FULL = 1


class Pair(NamedTuple):
    left: int = 1

    def total(self):
        return self.left


Point = namedtuple("Point", "x y")


@dataclass(order=True, frozen=True)
class Sizes:
    wide: int = 4
    rest: list = field(default_factory=list)


def logged(function):
    @functools.wraps(function)
    def call(*args, **kwargs):
        return function(*args, **kwargs)
    return call


@logged
def helper(x, scale=1.0, *, more=2):
    """Text."""
    return [scale * each for each in x if (lambda y: y > more)(each)]


double = functools.partial(helper, scale=2.0)
again = helper
square = lambda x: x * x


@functools.lru_cache(maxsize=None)
def kept(n):
    return n


@functools.partial(mx.compile, shapeless=True)
def fused(x):
    return x * 2


class Odd(nn.Module):
    LIMIT = 3

    @staticmethod
    def plain(x): return x

    @classmethod
    def made(cls): return cls()

    @property
    def size(self): return self.LIMIT

    @functools.cached_property
    def twice(self): return 2 * self.LIMIT

    @logged
    def __call__(self, x):
        return helper(x)

    alias = __call__


def _cache(self):
    from mlx_lm.models.cache import KVCache
    return [KVCache() for _ in self.layers]


Model.make_cache = _cache
'''
"""What a healthy model file may hold beside a model."""


def loaded(path: Path) -> tuple[ModuleType, nn.Module]:
    module = import_file(path)
    return module, build_tiny(module, resolve_arguments(module, config_of("llama")), seed=0)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write_model(tmp_path, "mine", more=HEALTHY)


def test_a_healthy_file_of_ones_own_is_known(path: Path) -> None:
    module, model = loaded(path)
    assert own_file(model) == path
    model.odd = module.Odd()
    assert foreign_code(model, path) == []
    assert foreign_code(model, path) == []
    assert foreign_code(model), "without the file nothing is known"


def test_a_function_replaced_in_a_file_of_ones_own_is_named(path: Path) -> None:
    module, model = loaded(path)
    assert foreign_code(model, path) == []
    module.scaled_dot_product_attention = lambda q, k, v, **_: q
    assert "mine.scaled_dot_product_attention comes from test_live_code.py" in one(model, path)


@pytest.mark.parametrize(
    ("old", "new", "name"),
    [
        ("return x * 2", "return x * 3", "fused"),
        ("return 2 * self.LIMIT", "return 2.0 * self.LIMIT", "Odd.twice"),
        ("(lambda y: y > more)", "(lambda y: y < more)", "helper"),
        ("x * x", "x + x", "square"),
        ("WINDOW = 8", "WINDOW = 9", "WINDOW"),
        ("LIMIT = 3", "LIMIT = 4", "Odd.LIMIT"),
        ("def plain(x):", "def plain(x, y=1):", "Odd.plain"),
    ],
)
def test_a_file_edited_since_it_was_imported_is_named(path: Path, old: str, new: str, name: str) -> None:
    module, model = loaded(path)
    model.odd = module.Odd()
    assert foreign_code(model, path) == []
    edited = path.read_text(encoding="utf-8").replace(old, new)
    path.write_text(edited, encoding="utf-8")
    found = "; ".join(foreign_code(model, path))
    assert f"mine.{name} " in found
    assert "start the program again" in found
    assert foreign_code(loaded(path)[1], path) == [], "imported again it is what the file says"
    assert f"mine.{name} " in "; ".join(foreign_code(model, path)), "the older model is not"


def test_defaults_edited_since_the_import_are_named(tmp_path: Path) -> None:
    path = write_model(tmp_path, "mine", more="\n\ndef scaled(x, by=2.0):\n    return by * x\n")
    _, model = loaded(path)
    assert foreign_code(model, path) == []
    path.write_text(path.read_text(encoding="utf-8").replace("by=2.0", "by=3.0"), encoding="utf-8")
    assert "mine.scaled() is not 3.0" in one(model, path)


def test_text_and_lines_make_no_difference(path: Path) -> None:
    _, model = loaded(path)
    edited = "# Above.\n\n" + path.read_text(encoding="utf-8").replace('"""Text."""', '"""Another."""')
    path.write_text(edited, encoding="utf-8")
    assert foreign_code(model, path) == []


def test_an_edit_of_the_same_size_and_time_is_found(path: Path) -> None:
    """A cached compilation of Python's own would be taken for the new text."""
    _, model = loaded(path)
    before = path.stat()
    other = path.with_suffix(".new")
    other.write_text(path.read_text(encoding="utf-8").replace("x * 2", "x * 3"), encoding="utf-8")
    os.utime(other, ns=(before.st_atime_ns, before.st_mtime_ns))
    other.replace(path)
    assert "mine.fused was changed" in one(model, path)


def test_a_base_class_of_another_module_is_named(
    tmp_path: Path, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "outside_base.py").write_text("class Above:\n    def more(self):\n        return 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    path = write_model(
        tmp_path, "below", more="\nimport outside_base\nclass M(outside_base.Above, nn.Module): pass\n"
    )
    module, model = loaded(path)
    model.odd = module.M()
    found = foreign_code(model, path)
    assert any("odd is a" in text for text in found)
    assert "no digest covers `import outside_base`" in found


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("import outside", "import outside"),
        ("import numpy as np, outside.deep as d", "import outside.deep"),
        ("from outside import f", "from outside import f"),
        ("from .sibling import f", "from .sibling import f"),
        ("from . import sibling", "from . import sibling"),
        ("from .. import sibling", "from .. import sibling"),
        ("def f():\n    import outside", "import outside"),
        ("f = __import__('outside')", "__import__(…)"),
        ("import importlib\nf = importlib.import_module('outside')", "import_module(…)"),
        ("exec(open('outside.py').read())", "exec(…)"),
    ],
)
def test_imports_that_no_digest_covers(tmp_path: Path, line: str, found: str) -> None:
    path = tmp_path / "mine.py"
    path.write_text(f"{line}\n", encoding="utf-8")
    assert foreign_imports(path) == [found]


@pytest.mark.parametrize(
    "line",
    [
        "from __future__ import annotations",
        "import mlx.core as mx\nmx.eval(1)",
        "from .base import BaseModelArgs",
        "from . import llama, rope_utils",
        "from ..tuner.lora import LoRALinear",
        "from mlx_lm.models.cache import KVCache",
        "from mlx_audit.caches import FixedCapacityKVCache",
        "import math, os.path, numpy",
    ],
)
def test_imports_that_are_covered(tmp_path: Path, line: str) -> None:
    path = tmp_path / "mine.py"
    path.write_text(f"{line}\n", encoding="utf-8")
    assert foreign_imports(path) == []
