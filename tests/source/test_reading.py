"""Files of any kind are read without running them, and what cannot be read is said."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mlx_audit.source import read_source
from mlx_audit.source.modules import LARGEST, models_folder
from source_files import decoder, hazards, marked, read

HAZARD = "n = int(offset)  #! SRC001"

MODEL = """
import mlx.nn as nn
class Model(nn.Module):
    def __call__(self, inputs, cache=None):
{body}
        return inputs
"""


def _unreadable(folder: Path, data: bytes | str) -> str:
    file = folder / "audited.py"
    file.write_bytes(data if isinstance(data, bytes) else data.encode())
    started = time.process_time()
    report = read_source(file)
    assert time.process_time() - started < 20
    assert not report.consumers
    return report.unreadable


def test_nothing_is_run_or_imported(tmp_path: Path) -> None:
    trap = tmp_path / "trap"
    source = decoder(
        top=f"import os\nopen({str(trap)!r}, 'w').write('ran')\nos._exit(3)\nwhile True: pass", model=HAZARD
    )
    assert hazards(read(tmp_path, source)) == marked(source)
    assert not trap.exists()


def test_the_package_loads_neither_mlx_nor_mlx_lm(tmp_path: Path) -> None:
    file = tmp_path / "audited.py"
    file.write_text(decoder(model=HAZARD))
    code = (
        "import sys; from pathlib import Path; from mlx_audit.source import read_source;"
        f"assert read_source(Path({str(file)!r})).hazards;"
        "assert not {'mlx', 'mlx_lm', 'numpy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_syntax_error_has_its_line(tmp_path: Path) -> None:
    assert "audited.py:2: " in _unreadable(tmp_path, "x = 1\ndef (:\n")


def test_large_file_is_refused(tmp_path: Path) -> None:
    assert f"at most {LARGEST}" in _unreadable(tmp_path, b"#" * 50_000_000)


@pytest.mark.parametrize("data", [b"x = 1\0\n", b"\xff\xfe\x00", b"# coding: nonsense\n", b"x = '\xe9'\n"])
def test_bytes_that_are_no_source(tmp_path: Path, data: bytes) -> None:
    assert "audited.py:" in _unreadable(tmp_path, data)


@pytest.mark.parametrize(
    "source",
    [
        "x = " + "(" * 5000 + ")" * 5000,
        "x = " + "[" * 150 + "]" * 150,
        "x = a" + ".a" * 20_000,
        "x = a" + "()" * 20_000,
        "x = " + "-" * 20_000 + "1",
        "x = " + "+".join(["1"] * 20_000),
        "x = " + "not " * 20_000 + "1",
        "if a: pass\n" + "elif a: pass\n" * 20_000,
        "".join(" " * depth + "if a:\n" for depth in range(99)) + " " * 99 + "pass",
        "x = f'" + "{" * 2000 + "}" * 2000 + "'",
        "x = " + "lambda: " * 5000 + "1",
        "class A:\n" + "".join(" " * depth + "class A:\n" for depth in range(1, 90)) + " " * 90 + "pass",
    ],
    ids=lambda source: source[:12].strip(),
)
@pytest.mark.parametrize("inside", [False, True], ids=["top", "step"])
def test_deep_nesting_is_survived(tmp_path: Path, source: str, inside: bool) -> None:
    file = tmp_path / "audited.py"
    body = (
        MODEL.format(body="\n".join(f"        {line}" for line in source.splitlines())) if inside else source
    )
    file.write_text(body)
    report = read_source(file)
    assert report.unreadable or (inside and not report.hazards)


def test_no_model(tmp_path: Path) -> None:
    assert _unreadable(tmp_path, "x = 1\n").endswith("audited.py:1: defines no class Model")


def test_a_model_that_is_no_class(tmp_path: Path) -> None:
    assert "no class that can be read" in _unreadable(tmp_path, "Model = make()\n")


@pytest.mark.parametrize("name", ["missing.py", "."])
def test_no_plain_file(tmp_path: Path, name: str) -> None:
    assert read_source(tmp_path / name).unreadable


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.py")
    assert "not a plain file" in read_source(tmp_path / "pipe.py").unreadable


def test_a_file_that_asks_for_too_much_work_is_not_clean(tmp_path: Path) -> None:
    calls = "\n".join(
        f"def f{n}(x, k):\n    return f{n + 1}(x, 2 * k), f{n + 1}(x, 2 * k + 1)" for n in range(20)
    )
    source = decoder(top=calls + "\ndef f20(x, k):\n    return k\n", model="n = f0(offset, 1)")
    started = time.process_time()
    report = read(tmp_path, source)
    assert time.process_time() - started < 20
    assert "too large to follow" in report.unreadable


def test_calls_that_nest_too_deeply_are_not_clean(tmp_path: Path) -> None:
    calls = "\n".join(f"def f{n}(x):\n    return f{n + 1}(x)" for n in range(60))
    source = decoder(top=calls + "\ndef f60(x):\n    return int(x)\n", model="n = f0(offset)")
    assert "too deeply" in read(tmp_path, source).unreadable


def test_many_methods_that_nobody_calls_cost_nothing(tmp_path: Path) -> None:
    source = decoder(
        methods="\n".join(f"def m{n}(self): return self.m{n + 1}()" for n in range(5000)), model=HAZARD
    )
    assert hazards(read(tmp_path, source)) == marked(source)


@pytest.mark.parametrize(
    "top",
    [
        "class A(B): pass\nclass B(A): pass\nclass Attn(A): pass",
        "class A(A): pass",
        "a = b\nb = a",
        "from .audited import Attention as Other",
        "from . import audited",
        "from .. import models",
        "from ..... import os",
        "from .nothing import gone",
        "from .base import *",
        "class A(type('x', (), {})): pass",
    ],
)
def test_cycles_and_strange_imports(tmp_path: Path, top: str) -> None:
    source = decoder(top=top, model=HAZARD)
    assert hazards(read(tmp_path, source)) == marked(source)


def test_a_model_that_inherits_from_itself(tmp_path: Path) -> None:
    assert read(tmp_path, "class Model(Model):\n    pass\n").hazards == ()


def test_a_class_that_contains_itself(tmp_path: Path) -> None:
    top = "class Tree(nn.Module):\n    def __init__(self, args, depth=0):\n"
    top += "        self.child = Tree(args, depth + 1)\n"
    top += "    def __call__(self, n):\n        self.child(n)\n        return int(n)  #! SRC001\n"
    source = decoder(top=top, model_init="self.tree = Tree(args)", model="n = self.tree(offset)")
    report = read(tmp_path, source)
    assert report.unreadable or hazards(report) == marked(source)


def test_imports_do_not_leave_the_models_folder(tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("def whole(x):\n    return int(x)\n")
    (tmp_path / "llama.py").write_text("def whole(x):\n    return int(x)\n")
    source = decoder(top="from .beside import whole\nfrom ..utils import load", model="n = whole(offset)")
    report = read(tmp_path, source)
    assert not report.hazards
    assert any("which is not read" in note for note in report.notes)


def test_an_overlay_is_read_in_place_of_a_module(tmp_path: Path) -> None:
    mended = tmp_path / "rope_utils.py"
    installed = models_folder()
    assert installed is not None
    text = (installed / "rope_utils.py").read_text()
    mended.write_text(text.replace("max(x.shape[-2] + offset", "mx.maximum(x.shape[-2] + offset"))
    llama = installed / "llama.py"
    assert [hazard.kind for hazard in read_source(llama).hazards] == ["max()/min()"]
    assert not read_source(llama, {"mlx_lm.models.rope_utils": mended}).hazards


@pytest.mark.parametrize(
    ("code", "note"),
    [
        ("n = getattr(cache[0], 'off' + 'set')", "computed name"),
        ("exec('n = int(offset)')", "exec()"),
        ("n = eval('int(offset)')", "eval()"),
        ("n = unheard.of(offset)", "which is not read"),
    ],
)
def test_what_cannot_be_followed_is_noted(tmp_path: Path, code: str, note: str) -> None:
    report = read(tmp_path, decoder(top="import unheard", model=code))
    assert any(note in text for text in report.notes)


def test_safe_consumers_are_recorded(tmp_path: Path) -> None:
    report = read(tmp_path, decoder(model="p = mx.arange(L) + offset"))
    assert {consumer.kind for consumer in report.safe} == {
        "rope offset",
        "update",
        "mask",
        "array arithmetic",
    }
    (mask,) = [consumer for consumer in report.safe if consumer.kind == "mask"]
    assert (mask.symbol, mask.code) == ("Model.__call__", "")
    assert mask.file == tmp_path / "audited.py"
