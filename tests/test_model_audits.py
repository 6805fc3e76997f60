"""What is shipped in model_audits/: every claim has a valid record, and every published configuration traces."""

from __future__ import annotations

import resource
from importlib.metadata import version

import pytest

from command import results_of
from mlx_audit import resources
from mlx_audit.evidence.records import load_record, record_path, staleness
from mlx_audit.manifests import Manifest, load_manifests

LARGEST = "meta-llama--Meta-Llama-3.1-405B"


@pytest.mark.parametrize("manifest", load_manifests(), ids=lambda manifest: manifest.family)
def test_the_cpu_record_is_valid_and_proves_what_is_claimed(manifest: Manifest) -> None:
    """If this fails: `make records`, and commit what it writes."""
    record = load_record(record_path(resources.model_audits() / "records", manifest.family, "cpu"))
    assert staleness(record, manifest, mlx_version=version("mlx")) == []
    for name, variant in manifest.variants.items():
        if variant.claims.compiled_decode != "undecided":
            assert record.variants[name].verdict().name == variant.claims.compiled_decode
            main = manifest.rope_kinds[0]
            assert all(record.variants[name].proves_rope(kind, main) for kind in manifest.rope_kinds)


def test_every_published_configuration_traces_to_one_graph_at_full_size() -> None:
    code, results = results_of("qwen2", "llama", "--profile", "ci", "--tier", "static,trace")
    assert code == 0
    real = [result for result in results if not result.configuration.startswith("tiny")]
    assert len(real) >= 28, "31 configurations, of which some have equal arguments"
    for result in real:
        proved = {c.code: c.status for c in result.checks if c.code.startswith(("TRC", "TOP"))}
        assert set(proved.values()) == {"pass"}, result.configuration
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss < 600 * 1024, "kilobytes"


def test_405_billion_parameters_state_the_cost_of_a_step() -> None:
    config = resources.model_audits() / "configurations" / f"{LARGEST}.json"
    code, (result,) = results_of("llama", "--tier", "trace,static", "--config", str(config))
    assert code == 0
    (cost,) = [c.figures["cost"] for c in result.checks if c.code == "TRC002"]
    assert cost["capacity"] == 8192
    # 405.85 billion weights in bfloat16, without the embedding that is only looked up; 126 layers of 8 heads of 128.
    assert cost["weights_bytes"] == pytest.approx(2 * (405.85e9 - 128_256 * 16_384), rel=1e-3)
    assert cost["cache_bytes"] == 126 * 2 * 8 * 128 * 2 * 8192
