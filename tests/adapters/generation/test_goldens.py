"""The generated modules of the five families on the card, and of every other one: current, in style, and right."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

import mlx.nn as nn
import pytest

from adapters.conftest import Install
from mlx_audit.adapters import FixedCapacityKVCacheProviding, GenericAdapter
from mlx_audit.adapters.generation import is_current, render_adapter
from mlx_audit.decode import CompiledDecodeSession
from mlx_audit.errors import NotCompileCapable
from mlx_audit.manifests import Manifest, find_manifest, load_manifests
from mlx_audit.models.build import build_tiny, resolve_arguments
from mlx_audit.models.modules import import_model
from mlx_audit.models.target import resolve_target
from tiny_models import Eager, tokens

GOLDENS = Path(__file__).parents[1] / "goldens"
CARDS = ("qwen2", "llama", "gpt_oss", "qwen3_5", "nemotron_h")
MANIFESTS = {manifest.family: manifest for manifest in load_manifests()}
VARIANTS = [(manifest.family, variant) for manifest in MANIFESTS.values() for variant in manifest.variants]


def loaded(file: Path) -> ModuleType:
    spec = spec_from_file_location(f"generated_{file.stem}", file)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def executed(text: str) -> Any:
    """Return the class of a generated text."""
    names: dict[str, Any] = {}
    exec(compile(text, "generated.py", "exec"), names)
    return names["Adapter"]


def tiny(family: str, variant: str) -> nn.Module:
    manifest = MANIFESTS[family]
    module = import_model(manifest.module)
    return build_tiny(module, resolve_arguments(module, manifest.variants[variant].tiny), seed=0)


def test_there_is_one_golden_for_each_family_on_the_card() -> None:
    assert {file.stem for file in GOLDENS.glob("*.py")} == set(CARDS)


@pytest.mark.parametrize("family", CARDS)
def test_goldens_are_what_is_generated_today(family: str) -> None:
    file = GOLDENS / f"{family}.py"
    assert is_current(resolve_target(family), file) == (True, ""), "make adapters"
    first, *rest = file.read_text().splitlines()
    made = rf"# Made by mlx-audit \d+\.\d+ from {family}\.yaml, sha256:[0-9a-f]{{16}}"
    line = rf"{made}; do not edit: mlx-audit adapt {family} --as module"
    assert re.fullmatch(line, first)
    assert "Made by" not in "\n".join(rest)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the modules of all families."""
    made = tmp_path_factory.mktemp("generated")
    for manifest in MANIFESTS.values():
        (made / f"{manifest.family}.py").write_text(render_adapter(manifest))
    return made


@pytest.mark.parametrize(
    "tool",
    [
        ("black", "--check", "--quiet"),
        ("isort", "--check-only", "--profile", "black"),
        ("ruff", "check", "--isolated", "--no-cache"),
    ],
    ids=lambda tool: tool[0],
)
def test_modules_are_in_the_style_of_mlx_lm(tool: tuple[str, ...], folder: Path) -> None:
    command = [sys.executable, "-m", *tool]
    done = subprocess.run([*command, str(folder)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    spoiled = folder.parent / "spoiled.py"
    spoiled.write_text("import sys\nimport os\nx = {'a':1}\n")
    assert subprocess.run([*command, str(spoiled)], capture_output=True, check=False).returncode == 1


def test_modules_are_short(folder: Path) -> None:
    lengths = {file.stem: len(file.read_text().splitlines()) for file in folder.glob("*.py")}
    assert max(lengths.values()) < 80, lengths
    assert lengths["qwen2"] < 25


@pytest.mark.parametrize(("family", "variant"), VARIANTS)
def test_caches_are_those_of_the_generic_adapter(family: str, variant: str) -> None:
    model = tiny(family, variant)
    cls = (
        loaded(GOLDENS / f"{family}.py").Adapter
        if family in CARDS
        else executed(render_adapter(MANIFESTS[family]))
    )
    adapter = cls(model)
    assert isinstance(adapter, FixedCapacityKVCacheProviding)
    for capacity, batch in ((21, 1), (5, 3)):
        own = adapter.new_fixed_capacity_cache(capacity, batch_size=batch)
        generic = GenericAdapter(model).new_fixed_capacity_cache(capacity, batch_size=batch)
        assert [described(cache) for cache in own] == [described(cache) for cache in generic]


def described(cache: Any) -> Any:
    parts = [(type(part), part.capacity, part.slots, part.rows) for part in cache.parts]
    return type(cache), parts, [(array.shape, array.dtype) for array in cache.state]


def test_a_session_through_a_generated_module_decodes_as_eager_does(install: Install) -> None:
    manifest = MANIFESTS["gpt_oss"]
    text = (GOLDENS / "gpt_oss.py").read_text()
    install("acme", {"acme_gpt_oss.py": text}, {manifest.module: "acme_gpt_oss:Adapter"})
    model = tiny("gpt_oss", "alternating")
    session, eager = CompiledDecodeSession(model, 24, evidence="ignore"), Eager(model)
    assert type(session._provider).__module__ == "acme_gpt_oss"
    prompt, forced = tokens(5), tokens(19, seed=2)
    session.prefill([prompt])
    eager.feed([prompt])
    for token in forced:  # the rings of 8 wrap twice
        got, want = session.step([token]), eager.feed([[token]])
        assert float(abs(got - want).max()) <= 1e-5 * float(abs(want).max())
    assert session.trace_count == 1


FAULTS = [
    (
        "gpt_oss",
        "window=args.sliding_window",
        "window=args.sliding_window - 1",
        "layer 0",
        "rotating(window=7, keep=0)",
    ),
    ("gpt_oss", "keep=0", "keep=4", "layer 0", "rotating(window=8, keep=4)"),
    ("gpt_oss", "i % 2 == 1", "i % 2 == 0", "", ""),
    ("gpt_oss", '== "full_attention"', '!= "full_attention"', "layer 0", "linear"),
    ("qwen3_5", "slots=2", "slots=3", "layer 0", "arrays(slots=3)"),
    ("qwen3_5", "(i + 1) %", "(i + 2) %", "layer 0", "linear"),
    (
        "qwen3_5",
        "entry(FixedCapacityKVCache)",
        "entry(FixedCapacityArraysCache, slots=2)",
        "layer 1",
        "arrays(slots=2)",
    ),
    (
        "qwen2",
        "range(args.num_hidden_layers)",
        "range(args.num_hidden_layers + 1)",
        "mlx_lm.models.qwen2",
        "5 as declared",
    ),
    ("nemotron_h", "slots=2", "slots=1", "cache 0", "arrays(slots=1)"),
    ("nemotron_h", '== "*"', '== "-"', "mlx_lm.models.nemotron_h", "6 as declared"),
    (
        "longcat_flash_ngram",
        "entry(FixedCapacityKVCache),\n",
        "entry(FixedCapacityArraysCache, slots=1),\n",
        "cache 1",
        "",
    ),
]


@pytest.mark.parametrize(("family", "old", "new", "place", "declared"), FAULTS)
def test_a_module_that_declares_other_caches_is_refused_by_name(
    family: str, old: str, new: str, place: str, declared: str
) -> None:
    text = render_adapter(MANIFESTS[family])
    assert old in text
    variant = next(iter(MANIFESTS[family].variants))
    adapter = executed(text.replace(old, new))(tiny(family, variant))
    if not place:  # what this configuration does not reach changes nothing
        assert adapter.new_fixed_capacity_cache(9)
        return
    with pytest.raises(NotCompileCapable) as caught:
        adapter.new_fixed_capacity_cache(9)
    assert place in str(caught.value.where)
    assert declared in str(caught.value.allowed)


def test_another_cache_class_than_ours_is_refused() -> None:
    text = render_adapter(MANIFESTS["qwen2"]).replace("FixedCapacityKVCache", "FixedCapacityKVCache as Base")
    text = text.replace("\n\nclass Adapter", "\n\nclass Own(Base):\n    pass\n\n\nclass Adapter", 1)
    adapter = executed(text.replace("entry(FixedCapacityKVCache as Base)", "entry(Own)"))(
        tiny("qwen2", "full")
    )
    with pytest.raises(NotCompileCapable, match="not a cache class of mlx-audit"):
        adapter.new_fixed_capacity_cache(9)


def test_rendering_changes_nothing_and_repeats() -> None:
    manifest: Manifest | None = find_manifest("llama")
    assert manifest is not None
    assert render_adapter(manifest) == render_adapter(manifest) == (GOLDENS / "llama.py").read_text()
