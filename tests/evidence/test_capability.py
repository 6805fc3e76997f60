"""May this very model decode compiled here? Only with a record that is there, whole, fresh and about it."""

from __future__ import annotations

import os
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from mlx_lm.models import qwen2

from evidence.conftest import check, every_check, of_other_code, result_of
from mlx_audit.decode import CompiledDecodeSession
from mlx_audit.errors import NotCompileCapable
from mlx_audit.evidence import identify, require_capable
from mlx_audit.evidence import records as records_module
from mlx_audit.evidence.capability import manifest_beside
from mlx_audit.evidence.environment import backend
from mlx_audit.evidence.records import (
    Record,
    RecordedResult,
    RecordedVariant,
    make_record,
    record_path,
    write_record,
)
from mlx_audit.evidence.standing import evidence_of, standing
from mlx_audit.manifests import find_manifest
from mlx_audit.models.build import build_tiny, resolve_arguments
from mlx_audit.models.modules import import_file
from model_files import write_manifest, write_model
from tiny_models import config_of, tiny_model, tokens


@pytest.fixture(autouse=True)
def _only_given_records(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave the records of the checkout and of the environment out."""
    monkeypatch.setattr(
        records_module.resources, "model_audits", _Nowhere(records_module.resources.model_audits())
    )
    monkeypatch.delenv("MLX_AUDIT_RECORDS", raising=False)


class _Nowhere:
    """The folder of manifests, whose `records` are elsewhere."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __call__(self) -> Any:
        return self

    def __truediv__(self, name: str) -> Path:
        return self.folder / ("no such folder" if name == "records" else name)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.folder, name)


def refusal(model: Any, folder: Path) -> str:
    with pytest.raises(NotCompileCapable) as caught:
        require_capable(model, records=folder)
    with pytest.raises(NotCompileCapable):
        CompiledDecodeSession(model, 8, records=folder)
    assert "mlx-audit run" in str(caught.value.fix)
    return str(caught.value)


def test_a_valid_record_lets_the_session_in(
    record: Record, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model("qwen2")
    write_record(record, tmp_path)
    identity = require_capable(model, records=tmp_path)
    assert (identity.manifest.family, identity.variant, identity.arguments) == ("qwen2", "full", model.args)
    session = CompiledDecodeSession(model, 8, records=tmp_path)
    session.prefill([tokens(3)])
    assert session.step([1]).shape == (1, 64)
    monkeypatch.setenv("MLX_AUDIT_RECORDS", str(tmp_path))
    assert require_capable(model).variant == "full"


def test_no_record(tmp_path: Path) -> None:
    text = refusal(tiny_model("qwen2"), tmp_path)
    assert "there is no record" in text
    assert text.endswith("fix: mlx-audit run qwen2 --record")


def test_damaged_record(record: Record, tmp_path: Path) -> None:
    write_record(record, tmp_path).write_text("{")
    assert "the record cannot be used" in refusal(tiny_model("qwen2"), tmp_path)


@pytest.mark.parametrize("key", ["model", "toolkit", "manifest"])
def test_stale_record(record: Record, tmp_path: Path, key: str) -> None:
    write_record(of_other_code(record, key), tmp_path)
    assert "the record is stale" in refusal(tiny_model("qwen2"), tmp_path)


def test_record_of_another_mlx(record: Record, tmp_path: Path) -> None:
    write_record(record.model_copy(update={"mlx": "0.31"}), tmp_path)
    assert "recorded with mlx 0.31" in refusal(tiny_model("qwen2"), tmp_path)


@pytest.mark.parametrize(("status", "word"), [("fail", "not-capable"), ("not-run", "undecided")])
def test_record_that_proves_something_else(record: Record, tmp_path: Path, status: str, word: str) -> None:
    checks = RecordedResult(configuration="x", checks=[check(status=status, reason="because")])
    record.variants["full"].results.append(checks)
    write_record(record, tmp_path)
    text = refusal(tiny_model("qwen2"), tmp_path)
    assert f"the variant is {word}" in text
    assert "because" in text


def test_a_record_with_limits_that_the_manifest_does_not_state_is_of_another_manifest(
    record: Record, tmp_path: Path
) -> None:
    record.variants["full"].limits.append("no padding")
    write_record(record, tmp_path)
    assert "found: full was recorded with other limits than qwen2.yaml states" in refusal(
        tiny_model("qwen2"), tmp_path
    )


def test_limits_that_were_taken_out_of_a_record_do_not_make_it_capable(tmp_path: Path) -> None:
    manifest = find_manifest("qwen2_vl")
    assert manifest is not None
    results = [result_of(*every_check(), variant="text", limits=[])]
    write_record(make_record(manifest, results, backend(), version("mlx")), tmp_path)
    found = standing(evidence_of(manifest, backend(), [tmp_path]), "text")
    assert (found.state, found.verdict) == ("stale", None)


def test_limited_is_enough_where_it_is_claimed(tmp_path: Path) -> None:
    manifest = find_manifest("qwen2_vl")
    assert manifest is not None
    limits = manifest.variants["text"].limits
    results = [result_of(*every_check(), variant="text", limits=limits)]
    write_record(make_record(manifest, results, backend(), version("mlx")), tmp_path)
    found = standing(evidence_of(manifest, backend(), [tmp_path]), "text")
    assert (found.claimed, found.state, found.verdict) == ("limited", "holds", "limited")


def test_record_without_this_variant(tmp_path: Path) -> None:
    manifest = find_manifest("llama")
    assert manifest is not None
    results = [result_of(*every_check(), variant="sliding")]
    write_record(make_record(manifest, results, backend(), version("mlx")), tmp_path)
    assert "does not cover this variant; found: sliding" in refusal(tiny_model("llama"), tmp_path)


def test_a_record_of_a_variant_that_no_manifest_knows(record: Record, tmp_path: Path) -> None:
    other = RecordedVariant(
        profile="quick", seed=0, results=[RecordedResult(configuration="x", checks=[check()])]
    )
    write_record(record.model_copy(update={"variants": {**record.variants, "other": other}}), tmp_path)
    assert "found: qwen2.yaml has no variant other" in refusal(tiny_model("qwen2"), tmp_path)


def test_record_copied_from_another_family(record: Record, tmp_path: Path) -> None:
    """Both families have a variant `full`, and the copy is fresh for its own module."""
    path = write_record(record, tmp_path)
    copy = record_path(tmp_path, "llama", record.backend)
    copy.parent.mkdir()
    copy.write_bytes(path.read_bytes())
    assert "another family or backend" in refusal(tiny_model("llama"), tmp_path)


def test_record_of_another_module_under_the_same_family(tmp_path: Path) -> None:
    module = "mlx_lm.models.llama"
    manifest = find_manifest("qwen2")
    assert manifest is not None
    other = manifest.model_copy(update={"module": module})
    write_record(make_record(other, [result_of(*every_check())], backend(), version("mlx")), tmp_path)
    assert f"the record is about another module: {module}" in refusal(tiny_model("qwen2"), tmp_path)


def test_rope_kind_that_was_not_proved(record: Record, tmp_path: Path) -> None:
    write_record(record, tmp_path)
    model = tiny_model("qwen2", rope_scaling={"rope_type": "dynamic", "factor": 2.0})
    assert "RoPE kind was not proved; found: dynamic" in refusal(model, tmp_path)
    linear = tiny_model("qwen2", rope_scaling={"rope_type": "linear", "factor": 2.0})
    assert "RoPE kind was not proved; found: linear" in refusal(linear, tmp_path), (
        "the record lacks tiny+linear"
    )
    record.variants["full"].results.append(RecordedResult(configuration="tiny+linear", checks=every_check()))
    write_record(record, tmp_path)
    assert require_capable(linear, records=tmp_path).variant == "full"


def test_record_that_lacks_a_check_of_today(record: Record, tmp_path: Path) -> None:
    gone = record.variants["full"].results[0].checks.pop(3).code
    write_record(record, tmp_path)
    assert "the variant is undecided" in refusal(tiny_model("qwen2"), tmp_path)
    assert f"the record lacks {gone}" in refusal(tiny_model("qwen2"), tmp_path)


def test_a_subclass_of_a_proved_model_is_another_model(record: Record, tmp_path: Path) -> None:
    write_record(record, tmp_path)
    model = tiny_model("qwen2")
    model.__class__ = type("Patched", (type(model),), {"__module__": "somewhere"})
    assert "no manifest declares this model" in refusal(model, tmp_path)


def test_evidence_ignored_needs_no_record(tmp_path: Path) -> None:
    assert CompiledDecodeSession(tiny_model("qwen2"), 8, records=tmp_path, evidence="ignore").capacity == 8


def test_identity_of_tiny_models() -> None:
    assert identify(tiny_model("llama")).variant == "full"
    sliding = tiny_model("llama", layer_types=["sliding_attention", "full_attention"] * 2, sliding_window=8)
    assert identify(sliding).variant == "sliding"
    model = tiny_model("llama")
    del model.args
    with pytest.raises(NotCompileCapable, match="args"):
        identify(model)


@pytest.mark.parametrize(
    ("needs", "when", "met"),
    [
        ("mlx_lm.models.qwen2.Attention", "self.n_heads == 4", True),
        ("mlx_lm.models.qwen2.Attention", "self.n_heads == 5", False),
        ("mlx_lm.models.qwen2.Attention", "self.n_heads == 5 or not self.rope", True),
        ("mlx_lm.models.qwen2.Attention", "name in names", True),
        ("mlx_lm.models.qwen2.Attention", "self.n_heads == 5 and name in names", False),
        ("mlx_lm.models.rope_utils.DynamicNTKScalingRoPE", "", False),
        ("mlx_lm.models.qwen2.Attention", "", True),
    ],
)
def test_a_model_that_reaches_what_no_audited_one_did_is_refused(
    record: Record, tmp_path: Path, needs: str, when: str, met: bool
) -> None:
    condition = {"what": "qwen2.py:1:1 key length: planted", "needs": [needs], "when": when}
    checks = record.variants["full"].results[0].checks
    next(found for found in checks if found.code == "SRC002").figures["conditional"] = [condition]
    write_record(record, tmp_path)
    if met:
        assert "planted: this configuration reaches code" in refusal(tiny_model("qwen2"), tmp_path)
    else:
        require_capable(tiny_model("qwen2"), records=tmp_path)


def test_what_is_no_manifest_beside_a_model_is_passed_over(tmp_path: Path) -> None:
    """A folder, a dangling link or a pipe with the name of a manifest neither ends nor holds up the session."""
    (tmp_path / "a.yaml").mkdir()
    (tmp_path / "b.yaml").symlink_to("nowhere")
    os.mkfifo(tmp_path / "c.yaml")
    (tmp_path / "d.yaml").symlink_to("d.yaml")
    path = write_model(tmp_path, "mine")
    assert manifest_beside(path) is None
    write_manifest(tmp_path, "mine")
    assert manifest_beside(path).path == tmp_path / "mine.yaml"


def test_the_refusal_of_ones_own_family_says_where_its_record_is_looked_for(tmp_path: Path) -> None:
    module = import_file(write_model(tmp_path, "mine"))
    manifest = write_manifest(tmp_path, "mine")
    model = build_tiny(module, resolve_arguments(module, config_of("llama")), seed=0)
    text = refusal(model, tmp_path / "elsewhere")
    place = tmp_path / "records"
    assert f"fix: mlx-audit run {manifest} --record, then pass records=Path({str(place)!r})" in text
    assert text.endswith(f"or set MLX_AUDIT_RECORDS={place}")


def test_a_model_whose_functions_are_replaced_is_refused(
    record: Record, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_record(record, tmp_path)
    require_capable(tiny_model("qwen2"), records=tmp_path)
    monkeypatch.setattr(qwen2, "scaled_dot_product_attention", lambda q, k, v, **_: q)
    text = refusal(tiny_model("qwen2"), tmp_path)
    assert "qwen2.scaled_dot_product_attention comes from test_capability.py" in text
