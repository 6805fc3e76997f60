"""A record as a results document: what it knows, and nothing that it does not."""

from __future__ import annotations

from pathlib import Path

from evidence.conftest import check
from mlx_audit.evidence.recorded import record_results
from mlx_audit.evidence.records import Record, RecordedResult
from mlx_audit.evidence.results_file import load_results
from mlx_audit.manifests import Manifest, find_manifest


def qwen2() -> Manifest:
    manifest = find_manifest("qwen2")
    assert manifest is not None
    return manifest


def test_a_record_becomes_results(record: Record, tmp_path: Path) -> None:
    results = record_results(record, qwen2())
    first, second = results.results
    assert (first.family, first.variant, first.configuration) == ("qwen2", "full", "tiny")
    assert second.configuration == "other"
    assert first.verdict == "capable"
    assert (first.claims["compiled_decode"].claimed, first.claims["compiled_decode"].verdict) == (
        "capable",
        "capable",
    )
    assert next(c for c in first.checks if c.code == "PAR001").figures == {"largest": 0.0, "text": "µ"}
    assert first.digests == record.digests
    known = results.environment
    assert (known.backend, known.mlx, known.compiler) == (record.backend, record.mlx, None)
    assert {known.mlx_audit, known.mlx_lm, known.python, known.platform} == {""}
    file = tmp_path / "results.json"
    file.write_text(results.to_json(), encoding="utf-8")
    assert load_results(file) == results


def test_a_stale_record_decides_nothing(record: Record) -> None:
    results = record_results(record, qwen2(), ["the source changed", "so did MLX"])
    for result in results.results:
        assert (result.verdict, result.reason) == ("undecided", "stale: the source changed; so did MLX")
        assert result.claims["compiled_decode"].verdict == "undecided"
        assert result.checks, "what was measured then is still shown"


def test_verdicts_are_recomputed(record: Record) -> None:
    record.variants["full"].results.append(
        RecordedResult(configuration="bad", checks=[check(status="fail", reason="off by one")])
    )
    verdicts = {r.configuration: r.verdict for r in record_results(record, qwen2()).results}
    assert verdicts == {"tiny": "capable", "other": "capable", "bad": "not-capable"}


def test_a_variant_that_the_manifest_no_longer_has_is_claimed_nothing(record: Record) -> None:
    record.variants["gone"] = record.variants.pop("full")
    assert {r.claims["compiled_decode"].claimed for r in record_results(record, qwen2()).results} == {None}
