"""`mlx-audit draft`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from command import mlx_audit, results_of
from mlx_audit import resources
from mlx_audit.cli import application
from mlx_audit.manifests import load_manifest
from model_files import FORWARD, write_config, write_model
from tiny_models import config_of

GPT_OSS = resources.model_audits() / "configurations" / "openai--gpt-oss-20b.json"
INT = (
    "queries = self.rope(queries, offset=cache.offset)",
    "queries = self.rope(queries, offset=int(cache.offset))",
)
OWN_CACHE = """
from mlx_lm.models.cache import KVCache as _KVCache


class OwnCache(_KVCache):
    pass


Model.make_cache = lambda self: [OwnCache() for _ in self.layers]
"""


def test_a_family_is_drafted_and_the_same_bytes_come_again(tmp_path: Path) -> None:
    file = tmp_path / "gpt_oss.yaml"
    done = mlx_audit("draft", "gpt_oss", "--config", GPT_OSS, "-o", file)
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
    manifest = load_manifest(file)
    (variant,) = manifest.variants.values()
    assert (manifest.module, manifest.arguments) == ("mlx_lm.models.gpt_oss", "args")
    assert variant.exactness == "reordered"
    assert variant.claims.compiled_decode == "undecided"
    labels = [spec.label() for spec in manifest.cache_specs(variant.tiny)]
    assert labels == ["rotating(window=8, keep=0)", "linear"] * 2
    assert [item.kind for item in manifest.rope] == ["yarn"]
    text = file.read_text(encoding="utf-8")
    assert "# SRC001 mlx_lm/models/rope_utils.py:" in text
    assert any("Model.make_cache" in source for source in manifest.sources)
    assert manifest.configurations == [GPT_OSS.stem]
    kept = tmp_path / "configurations" / GPT_OSS.name
    assert kept.read_bytes() == GPT_OSS.read_bytes()
    assert f"wrote {file} and configurations/{GPT_OSS.name}; next: mlx-audit run {file}" in done.stderr
    again = mlx_audit("draft", "gpt_oss", "--config", kept, "-o", file, "--force")
    assert f"wrote {file}; next:" in again.stderr
    assert file.read_text(encoding="utf-8") == text


def test_what_cannot_be_written_is_refused_before_any_work(tmp_path: Path) -> None:
    there = tmp_path / "there.yaml"
    there.write_text("mine\n", encoding="utf-8")
    done = mlx_audit("draft", "gpt_oss", "--config", GPT_OSS, "-o", there)
    assert done.returncode == 2
    assert "the file exists" in done.stderr
    assert "--force" in done.stderr
    model, config = write_model(tmp_path, "my_llama"), write_config(tmp_path)
    (tmp_path / "other").mkdir()
    done = mlx_audit("draft", model, "--config", config, "-o", tmp_path / "other" / "m.yaml")
    assert done.returncode == 2
    assert "must lie beside its model file" in done.stderr
    assert there.read_text(encoding="utf-8") == "mine\n"


def test_a_draft_needs_a_configuration(tmp_path: Path) -> None:
    done = mlx_audit("draft", "qwen2")
    assert done.returncode == 2
    assert "fix: mlx-audit draft qwen2 --config config.json" in done.stderr
    for arguments in (("draft", "phixtral"), ("run", "phixtral"), ("adapt", "phixtral", "--as", "patch")):
        refused = CliRunner().invoke(application(), arguments)
        assert refused.stderr.endswith("fix: add --config config.json\n")
    done = mlx_audit("draft", resources.model_audits() / "qwen2.yaml")
    assert (done.returncode, done.stdout) == (2, "")


def test_a_model_file_is_drafted_with_its_hazard(tmp_path: Path) -> None:
    model, config = write_model(tmp_path, "my_llama", INT), write_config(tmp_path)
    file = tmp_path / "my_llama.yaml"
    file.write_text("old", encoding="utf-8")
    done = mlx_audit("draft", model, "--config", config, "-o", file, "--force")
    assert done.returncode == 0, done.stderr
    manifest = load_manifest(file)
    assert (manifest.family, manifest.module) == ("my_llama", "./my_llama.py")
    line = 1 + model.read_text(encoding="utf-8")[: model.read_text(encoding="utf-8").index(INT[1])].count(
        "\n"
    )
    assert f"# SRC001 my_llama.py:{line}:" in file.read_text(encoding="utf-8")
    assert manifest.configurations == ["my_llama"]
    assert manifest.configuration_path("my_llama").read_bytes() == config.read_bytes()
    assert done.stderr.endswith(f"next: mlx-audit adapt {file} --as patch\n")


def test_no_configuration_and_no_source_is_written_over(tmp_path: Path) -> None:
    model, config = write_model(tmp_path, "my_llama"), write_config(tmp_path)
    kept = tmp_path / "configurations" / "my_llama.json"
    kept.parent.mkdir()
    kept.write_text("{}", encoding="utf-8")
    draft = ("draft", model, "--config", config)
    done = mlx_audit(*draft, "-o", tmp_path / "my_llama.yaml")
    assert done.returncode == 2
    assert (
        f"{kept}: another configuration of this name is there already; fix: remove it, or copy" in done.stderr
    )
    source = model.read_text(encoding="utf-8")
    done = mlx_audit(*draft, "-o", model, "--force")
    assert done.returncode == 2
    assert "write over what is audited" in done.stderr
    assert (kept.read_text(encoding="utf-8"), model.read_text(encoding="utf-8")) == ("{}", source)


@pytest.mark.parametrize(
    ("harm", "says"),
    [
        ("while True:\n    pass\n", "time-out"),
        ("import os\nos._exit(0)\n", "ended with exit status 0"),
        ("import os\nos.abort()\n", "SIGABRT"),
        ("raise ValueError('no')\n", "cannot be imported"),
    ],
)
def test_a_hostile_file_gives_a_message_and_no_draft(tmp_path: Path, harm: str, says: str) -> None:
    model, config = write_model(tmp_path, "bad", more=harm), write_config(tmp_path)
    file = tmp_path / "bad.yaml"
    done = mlx_audit("draft", model, "--config", config, "-o", file, "--timeout", "8")
    assert done.returncode in (1, 2)
    assert says in done.stderr
    assert "Traceback" not in done.stderr.splitlines()[-1]
    assert not file.exists()


def test_a_cache_class_of_its_own_is_named(tmp_path: Path) -> None:
    model, config = write_model(tmp_path, "own", more=OWN_CACHE), write_config(tmp_path)
    done = mlx_audit("draft", model, "--config", config)
    assert (done.returncode, done.stdout) == (4, "")
    assert "layer 0" in done.stderr
    assert "OwnCache" in done.stderr


def test_a_model_that_raises_in_its_forward_is_told_with_its_line(tmp_path: Path) -> None:
    model = write_model(tmp_path, "raises", (FORWARD, f"        raise KeyError('x')\n{FORWARD}"))
    done = mlx_audit("draft", model, "--config", write_config(tmp_path))
    assert done.returncode == 2
    assert "KeyError" in done.stderr


@pytest.mark.nightly
def test_a_draft_runs_and_is_confirmed(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(config_of("qwen3_5", "hybrid")), encoding="utf-8")
    file = tmp_path / "qwen3_5.yaml"
    done = mlx_audit("draft", "qwen3_5", "--config", config, "-o", file)
    assert done.returncode == 0, done.stderr
    code, results = results_of(file)
    assert code == 0
    assert [item.verdict for item in results] == ["capable"]
