"""What is shipped in model_audits/: every claim has a valid record, and every published configuration traces."""

from __future__ import annotations

import functools
import subprocess
import sys
from importlib.metadata import version

import pytest

from audited import line_of
from command import COMMAND, results_of
from mlx_audit import resources
from mlx_audit.evidence.records import load_record, record_path, staleness
from mlx_audit.evidence.results import Result, Results
from mlx_audit.manifests import Manifest, load_manifests
from mlx_audit.models.modules import import_model

LARGEST = "meta-llama--Meta-Llama-3.1-405B"
LARGE = [
    ("gpt_oss", "openai--gpt-oss-20b"),
    ("gpt_oss", "openai--gpt-oss-120b"),
    ("llama", LARGEST),
    ("nemotron_h", "nvidia--Nemotron-H-8B-Base-8K"),
    ("nemotron_h", "nvidia--NVIDIA-Nemotron-3-Nano-30B-A3B-BF16"),
    ("nemotron_h", "nvidia--NVIDIA-Nemotron-3-Ultra-550B-A55B-BF16"),
    ("qwen3_5_moe", "Qwen--Qwen3.5-122B-A10B"),
    ("qwen3_5_moe", "Qwen--Qwen3.5-397B-A17B"),
]
REFUTED = {"llama4": "linds = mx.arange(start, end)"}
"""Families claimed not to be capable, and the line of each that takes the position for a Python number."""

PUBLISHING = [manifest for manifest in load_manifests() if manifest.configurations]
ORDINARY = ("qwen2", "gpt_oss", "falcon_h1", "llama4")
"""Families whose published configurations every run of the tests traces: one of each kind of cache. The records hold
what came of all others."""
AT_FULL_SIZE = [
    pytest.param(
        manifest,
        profile,
        id=f"{profile}-{manifest.family}",
        marks=[] if profile == "quick" and manifest.family in ORDINARY else pytest.mark.nightly,
    )
    for manifest in PUBLISHING
    for profile in ("quick", "ci")
]


@pytest.mark.parametrize("manifest", load_manifests(), ids=lambda manifest: manifest.family)
def test_the_cpu_record_is_valid_and_proves_what_is_claimed(manifest: Manifest) -> None:
    """If this fails: `make records`, and commit what it writes."""
    record = load_record(record_path(resources.model_audits() / "records", manifest.family, "cpu"))
    assert staleness(record, manifest, mlx_version=version("mlx")) == []
    for name, variant in manifest.variants.items():
        if variant.claims.compiled_decode != "undecided":
            assert record.variants[name].verdict().name == variant.claims.compiled_decode
            kinds = manifest.rope_kinds or ["default"]
            assert all(record.variants[name].proves_rope(kind, kinds[0]) for kind in kinds)


@pytest.mark.parametrize(("manifest", "profile"), AT_FULL_SIZE)
def test_published_configurations_trace_to_one_graph_at_full_size(manifest: Manifest, profile: str) -> None:
    """Profile quick takes three a variant; ci all, as the records do that `make records` makes."""
    code, results = results_of(manifest.family, "--profile", profile, "--tier", "static,trace")
    assert code == (1 if manifest.family in REFUTED else 0), "with --tier the checks alone decide"
    real = {r.configuration: r for r in results if not r.configuration.startswith("tiny")}
    assert real.keys() <= set(manifest.configurations), "some have equal arguments and are left out"
    assert real
    for name, result in real.items():
        claimed = result.claims["compiled_decode"].claimed
        proved = {c.code: c.status for c in result.checks}
        if claimed in ("capable", "limited"):
            assert proved["TRC001"] == "pass", name
            assert set(proved.values()) <= {"pass", "not-applicable"}, name
        elif claimed == "not-capable":
            assert [code for code, status in proved.items() if status == "fail"] == ["SRC001", "TRC001"], name
            assert [c.where for c in result.checks if c.code == "TRC001"] == [_refuted_at(manifest)], name


def _refuted_at(manifest: Manifest) -> str:
    """Return where a family's graph cannot be traced, as a check names it."""
    module = import_model(manifest.module)
    return f"{manifest.module.replace('.', '/')}.py:{line_of(module, REFUTED[manifest.family])}"


MEASURE = """
import os, subprocess, sys
process = subprocess.Popen(sys.argv[1:], stderr=subprocess.DEVNULL)
_, status, used = os.wait4(process.pid, 0)
print(used.ru_maxrss, file=sys.stderr)
sys.exit(os.waitstatus_to_exitcode(status))
"""
"""Runs a command and says how much memory it took; a process that is started by a larger one is charged with that."""


@functools.cache
def traced(family: str, name: str) -> tuple[int, Result, int]:
    """Trace one published configuration in a process of its own: exit code, result, and the most kilobytes held."""
    config = resources.model_audits() / "configurations" / f"{name}.json"
    command = [*COMMAND, "run", family, "--tier", "static,trace", "--config", str(config), "--json", "-"]
    measured = [sys.executable, "-c", MEASURE, *command]
    done = subprocess.run(measured, capture_output=True, text=True, check=False)
    (result,) = Results.model_validate_json(done.stdout).results
    return done.returncode, result, int(done.stderr.splitlines()[-1])


@pytest.mark.xdist_group("large")
@pytest.mark.parametrize(("family", "name"), LARGE, ids=[name for _, name in LARGE])
def test_a_large_configuration_traces_in_little_memory(family: str, name: str) -> None:
    code, result, kilobytes = traced(family, name)
    assert code == 0
    assert {c.status for c in result.checks} <= {"pass", "not-applicable"}
    assert kilobytes < 600 * 1024, "of the largest process"


@pytest.mark.xdist_group("large")
def test_405_billion_parameters_state_the_cost_of_a_step() -> None:
    _, result, _ = traced("llama", LARGEST)
    (cost,) = [c.figures["cost"] for c in result.checks if c.code == "TRC002"]
    assert cost["capacity"] == 8192
    # 405.85 billion weights in bfloat16, without the embedding that is only looked up; 126 layers of 8 heads of 128.
    assert cost["weights_bytes"] == pytest.approx(2 * (405.85e9 - 128_256 * 16_384), rel=1e-3)
    assert cost["cache_bytes"] == 126 * 2 * 8 * 128 * 2 * 8192
